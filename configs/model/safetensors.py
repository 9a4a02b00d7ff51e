"""A Llama-family model in a folder as Hugging Face lays it out: config.json and safetensors files.

The safetensors header is read here, since the library gives NumPy no bfloat16. As with GGUF, every
length is held against the file before it is used.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.model.errors import ModelError
from configs.model.metadata import Metadata
from configs.model.quant import ENCODINGS, Encoding
from configs.model.shape import ModelShape, check_tensors

MAX_HEADER_BYTES = 100_000_000
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_ENCODINGS = {each.name: each for each in ENCODINGS.values() if each.weights == 1}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError, also for what is a pipe or a device: such a
    read need not end."""
    try:
        if not path.is_file():
            raise FileNotFoundError("no such file")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: not a JSON object")
    return found


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies in a file that was mapped, or read whole."""

    data: mmap.mmap | bytes
    shape: tuple[int, ...]
    encoding: Encoding
    offset: int

    def raw(self) -> NDArray[np.uint8]:
        """Its bytes as they are stored."""
        count = prod(self.shape) * self.encoding.size
        return np.frombuffer(self.data, np.uint8, count, self.offset)

    def decoded(self) -> NDArray[np.float32]:
        """Its numbers; may be a read-only view."""
        return self.encoding.decode(self.raw().reshape(-1, self.encoding.size)).reshape(self.shape)


def _place(name: str, row: Any, data: mmap.mmap | bytes, start: int) -> Place:
    """One row of the header, checked."""
    match row:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            encoding = _ENCODINGS.get(dtype)
        case _:
            raise ModelError(f"the header's row of '{name}' is malformed")
    if encoding is None:
        raise ModelError(f"tensor '{name}' is {dtype}; supported are {', '.join(_ENCODINGS)}")
    if not all(type(size) is int and size > 0 for size in shape):
        raise ModelError(f"tensor '{name}' has shape {shape}")
    if not 0 <= begin <= end <= len(data) - start or end - begin != prod(shape) * encoding.size:
        raise ModelError(f"truncated or misplaced: tensor '{name}'")
    return Place(data, tuple(shape), encoding, start + begin)


def read_places(data: mmap.mmap | bytes) -> dict[str, Place]:
    """Every tensor of one safetensors file. Raises ModelError, and ValueError on broken JSON."""
    size = int.from_bytes(data[:8], "little")
    if size > min(MAX_HEADER_BYTES, len(data) - 8):
        raise ModelError(f"truncated: a header of {size} bytes")
    header = json.loads(data[8 : 8 + size])
    if not isinstance(header, dict):
        raise ModelError("the header is not a JSON object")
    header.pop("__metadata__", None)
    return {name: _place(name, row, data, 8 + size) for name, row in header.items()}


def _read_file(path: Path) -> dict[str, Place]:
    try:
        with path.open("rb") as file:
            return read_places(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {error}") from error


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the ones that the index names, or the only one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(each, str) for each in names.values()):
        raise ModelError(f"{index}: no 'weight_map' of names")
    if any(Path(each).name != each for each in names.values()):
        raise ModelError(f"{index}: a file outside the folder")
    return [folder / each for each in sorted(set(names.values()))]


def _rope_theta(config: dict[str, Any]) -> float:
    """The rotary base; scaled rotations are refused. Newer files keep both in one object."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ModelError("'rope_parameters' must be an object")
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ModelError("scaled rotary embeddings are not supported")
    merged = {"rope_theta": rope.get("rope_theta", config.get("rope_theta", 10_000.0))}
    return Metadata(merged).number("rope_theta")


def _context(config: dict[str, Any], arch: str) -> int:
    """Within the sliding window, where there is one, attention is full and ours is exact."""
    known = Metadata({key: value for key, value in config.items() if value is not None})
    context = known.count("max_position_embeddings")
    if arch.startswith("qwen") and not known.flag("use_sliding_window", False):
        return context
    return min(context, known.count("sliding_window", context))


def read_shape(config: dict[str, Any]) -> ModelShape:
    """The shape that a config.json describes. Raises ModelError for what isn't supported."""
    known = Metadata({key: value for key, value in config.items() if value is not None})
    kind = known.string("model_type")
    if kind not in ARCHITECTURES:
        raise ModelError(f"model type '{kind}' is not supported (only {', '.join(ARCHITECTURES)})")
    if known.string("hidden_act", "silu") != "silu":
        raise ModelError("only the activation 'silu' is supported")
    arch = ARCHITECTURES[kind]
    hidden = known.count("hidden_size")
    heads = known.count("num_attention_heads")
    return ModelShape(
        arch=arch,
        layers=known.count("num_hidden_layers"),
        hidden=hidden,
        intermediate=known.count("intermediate_size"),
        heads=heads,
        kv_heads=known.count("num_key_value_heads", heads),
        head_dim=known.count("head_dim", max(1, hidden // heads)),
        vocab=known.count("vocab_size"),
        rope_theta=_rope_theta(config),
        rms_eps=known.number("rms_norm_eps", 1e-6),
        context_tokens=_context(config, arch),
        tied_head=known.flag("tie_word_embeddings", False),
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
    )


class FolderWeights:
    """The weights in a folder of safetensors files (see configs.model.weights.Weights)."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError for a folder that is malformed, incomplete or not supported."""
        if not (folder / "config.json").exists():
            raise ModelError(
                f"{folder}: no config.json in it; a model is a GGUF file, or a folder with "
                "config.json and safetensors files"
            )
        try:
            self.shape = read_shape(read_json(folder / "config.json"))
            self._places = self._read(folder)
            check_tensors(self.shape, ((name, at.shape) for name, at in self._places.items()))
        except ModelError as error:
            raise ModelError(f"{folder}: {error}") from error

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self._place(name).decoded()

    def encoding(self, name: str) -> str:
        return self._place(name).encoding.name

    def encoded(self, name: str) -> NDArray[np.uint8]:
        place = self._place(name)
        return place.raw().reshape(prod(place.shape[:-1]), -1)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"wr-weights-folder-1 {self.shape}".encode())
        for name in sorted(self._places):
            place = self._places[name]
            digest.update(f"{name} {place.shape} {place.encoding.name}\n".encode())
            digest.update(place.raw().data)
        return digest.hexdigest()

    def _place(self, name: str) -> Place:
        try:
            return self._places[name]
        except KeyError:
            raise ModelError(f"no tensor '{name}'") from None

    def _read(self, folder: Path) -> dict[str, Place]:
        places: dict[str, Place] = {}
        for path in _files(folder):
            for name, place in _read_file(path).items():
                if name in places:
                    raise ModelError(f"tensor '{name}' is in two files")
                places[name] = place
        return dict(self._needed(places))

    def _needed(self, places: dict[str, Place]) -> Iterator[tuple[str, Place]]:
        """Without what older writers stored besides: rotary tables, and a copy of a tied head."""
        for name, place in places.items():
            copied_head = self.shape.tied_head and name == "lm_head.weight"
            if not copied_head and not name.endswith("rotary_emb.inv_freq"):
                yield name, place
