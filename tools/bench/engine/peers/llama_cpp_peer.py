"""llama.cpp through its C interface, by ctypes: any build of its library will do.

The library is the one given, or that of this interpreter's llama-cpp-python. Settings that differ
from version to version are left at their defaults inside a buffer larger than any version's; the
ones that are set here have kept their places.
"""

from __future__ import annotations

import ctypes
import os
import random
import time
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_float, c_int8, c_int32, c_void_p
from pathlib import Path
from typing import Any

from talk import serve

BATCH_TOKENS = 2048
BF16_FILE = 32  # LLAMA_FTYPE_MOSTLY_BF16


class _Batch(Structure):
    _fields_ = [
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    ]


class _Params(Structure):
    """Of a model, a context, or quantising; only leading numbers are ever set."""

    _fields_ = [("leading", c_int32 * 4), ("allow_requantize", c_bool), ("rest", c_int8 * 1003)]


def _library(path: str) -> ctypes.CDLL:
    file = _file(path)
    for name in ("libggml-base", "libggml"):
        for other in sorted(file.parent.glob(f"{name}.*so*")):
            ctypes.CDLL(str(other), mode=ctypes.RTLD_GLOBAL)
            break
    return ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)


def _file(path: str) -> Path:
    folder = Path(path) if path else _installed()
    if folder.is_file():
        return folder
    found = sorted(folder.glob("libllama.so*")) or sorted(folder.glob("libllama.*so*"))
    if not found:
        raise FileNotFoundError(f"no libllama in {folder}")
    return found[0]


def _installed() -> Path:
    from importlib.util import find_spec

    spec = find_spec("llama_cpp")
    if spec is None or not spec.origin:
        raise FileNotFoundError("llama-cpp-python is not installed here")
    return Path(spec.origin).parent / "lib"


class LlamaCpp:
    """One model; a context for each measurement."""

    def load(
        self, model: str, folder: str, library: str, dtype: str, threads: int, **_: Any
    ) -> dict[str, object]:
        self._threads = threads
        self._random = random.Random(0)
        self._quiet = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)(lambda *_: None)
        lib = self._lib = _library(library)
        _declare(lib)
        lib.llama_log_set(self._quiet, None)
        _load_backends(lib, _file(library).parent)
        lib.llama_backend_init()
        if dtype == "bfloat16":
            model = self._as_bf16(model, folder)
        self._model = lib.llama_model_load_from_file(
            model.encode(), lib.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError("the model can't be loaded")
        vocab = lib.llama_model_get_vocab(self._model)
        self._vocab = lib.llama_vocab_n_tokens(vocab)
        self._sampler = lib.llama_sampler_init_greedy()
        described = ctypes.create_string_buffer(128)
        lib.llama_model_desc(self._model, described, len(described))
        features = lib.llama_print_system_info().decode()
        return {
            "precision": described.value.decode(),
            "version": _file(library).name,
            "cpu": features,
        }

    def prefill(self, tokens: int) -> dict[str, float]:
        context = self._context(tokens + 1, 1)
        begun = time.perf_counter()
        for first in range(0, tokens, BATCH_TOKENS):
            count = min(BATCH_TOKENS, tokens - first)
            rows = [(0, first + place) for place in range(count)]
            self._decode(context, rows, [], last=first + count == tokens)
        self._lib.llama_sampler_sample(self._sampler, context, -1)
        seconds = time.perf_counter() - begun
        self._lib.llama_free(context)
        return {"seconds": seconds}

    def decode(self, rows: int, context: int, steps: int) -> dict[str, float]:
        held = self._context((context + steps + 2) * rows, rows)
        for row in range(rows):
            self._decode(held, [(row, place) for place in range(context)], [], last=True)
        tokens = [self._random.randrange(self._vocab) for _ in range(rows)]
        for step in range(steps + 1):
            if step == 1:
                begun = time.perf_counter()
            self._decode(held, [(row, context + step) for row in range(rows)], tokens)
            tokens = [
                self._lib.llama_sampler_sample(self._sampler, held, row) for row in range(rows)
            ]
        seconds = time.perf_counter() - begun
        self._lib.llama_free(held)
        return {"seconds": seconds}

    def _as_bf16(self, model: str, folder: str) -> str:
        """The same weights, written once more as bfloat16."""
        lib = self._lib
        path = os.path.join(folder, "model-bf16.gguf")
        params = lib.llama_model_quantize_default_params()
        params.leading[0], params.leading[1] = self._threads, BF16_FILE
        params.allow_requantize = True
        if lib.llama_model_quantize(model.encode(), path.encode(), byref(params)):
            raise RuntimeError("the model can't be written as bfloat16")
        return path

    def _context(self, tokens: int, rows: int) -> int:
        lib = self._lib
        params = lib.llama_context_default_params()
        per_row = -(-tokens // rows // 256) * 256 + 256
        params.leading[0] = per_row * rows  # n_ctx
        params.leading[1] = BATCH_TOKENS  # n_batch
        params.leading[3] = rows  # n_seq_max
        context = lib.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError("no context")
        lib.llama_set_n_threads(context, self._threads, self._threads)
        return int(context)

    def _decode(
        self,
        context: int,
        places: list[tuple[int, int]],
        tokens: list[int],
        last: bool | None = None,
    ) -> None:
        """Tokens, random ones unless given, at (sequence, position); logits for all of them, or
        for the last one only, or for none."""
        lib = self._lib
        batch = lib.llama_batch_init(len(places), 0, 1)
        batch.n_tokens = len(places)
        for at, (row, position) in enumerate(places):
            batch.token[at] = tokens[at] if tokens else self._random.randrange(self._vocab)
            batch.pos[at] = position
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = row
            batch.logits[at] = last is None or (last and at == len(places) - 1)
        code = lib.llama_decode(context, batch)
        lib.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode says {code}")


def _load_backends(lib: ctypes.CDLL, folder: Path) -> None:
    """Builds with one library for each kind of CPU choose among them now."""
    try:
        load = lib.ggml_backend_load_all_from_path
    except AttributeError:
        return
    load.argtypes, load.restype = [c_char_p], None
    load(str(folder).encode())


def _declare(lib: ctypes.CDLL) -> None:
    signatures: dict[str, tuple[list[Any], Any]] = {
        "llama_log_set": ([c_void_p, c_void_p], None),
        "llama_backend_init": ([], None),
        "llama_print_system_info": ([], c_char_p),
        "llama_model_default_params": ([], _Params),
        "llama_context_default_params": ([], _Params),
        "llama_model_quantize_default_params": ([], _Params),
        "llama_model_quantize": ([c_char_p, c_char_p, c_void_p], ctypes.c_uint32),
        "llama_model_load_from_file": ([c_char_p, _Params], c_void_p),
        "llama_model_get_vocab": ([c_void_p], c_void_p),
        "llama_model_desc": ([c_void_p, c_char_p, ctypes.c_size_t], c_int32),
        "llama_vocab_n_tokens": ([c_void_p], c_int32),
        "llama_init_from_model": ([c_void_p, _Params], c_void_p),
        "llama_free": ([c_void_p], None),
        "llama_set_n_threads": ([c_void_p, c_int32, c_int32], None),
        "llama_batch_init": ([c_int32, c_int32, c_int32], _Batch),
        "llama_batch_free": ([_Batch], None),
        "llama_decode": ([c_void_p, _Batch], c_int32),
        "llama_sampler_init_greedy": ([], c_void_p),
        "llama_sampler_sample": ([c_void_p, c_void_p, c_int32], c_int32),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, result


if __name__ == "__main__":
    serve(LlamaCpp())
