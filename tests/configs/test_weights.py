"""Weights from GGUF and from safetensors: same names, same row order, nothing left unread."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.model.errors import ModelError
from configs.model.gguf import GGUFFile
from configs.model.quant import ENCODINGS
from configs.model.shape import tensor_shapes
from configs.model.weights import open_weights
from tests.fakes.gguf_writer import write_gguf
from tests.fakes.tiny_folder import (
    HEADS,
    KV_HEADS,
    folder_config,
    folder_weights,
    save_weights,
    write_tiny_folder,
)
from tests.fakes.tiny_model import write_tiny_gguf

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def gguf_name(name: str) -> str:
    for canonical, short in GGUF_NAMES.items():
        name = name.replace(canonical, short)
    return name


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the q and k of a Llama."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(weight.shape)


def write_as_gguf(path: Path, tiny_model: Path, arch: str, weights: dict[str, np.ndarray]) -> Path:
    """The weights as llama.cpp's converter would write them, beside the tiny model's metadata."""
    metadata = {
        key.replace("llama.", f"{arch}."): value
        for key, value in GGUFFile(tiny_model).metadata.items()
    }
    metadata["general.architecture"] = arch
    tensors = dict(weights)
    if arch == "llama":
        for name in weights:
            if "q_proj" in name or "k_proj" in name:
                tensors[name] = permuted(weights[name], HEADS if "q_proj" in name else KV_HEADS)
    return write_gguf(path, metadata, {gguf_name(name): each for name, each in tensors.items()})


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_both_kinds_of_file_give_the_same_weights(
    tmp_path: Path, tiny_model: Path, kind: str, tied: bool
) -> None:
    arch = "llama" if kind == "mistral" else kind
    written = folder_weights(kind, tied)
    folder = open_weights(write_tiny_folder(tmp_path / "folder", kind=kind, tied=tied))
    gguf = open_weights(write_as_gguf(tmp_path / "a.gguf", tiny_model, arch, written))
    assert gguf.shape.rms_eps == pytest.approx(folder.shape.rms_eps)  # GGUF keeps float32
    assert replace(gguf.shape, rms_eps=folder.shape.rms_eps) == folder.shape
    assert (gguf.shape.qkv_bias, gguf.shape.qk_norm) == (kind == "qwen2", kind == "qwen3")
    assert gguf.shape.tied_head is tied
    assert set(gguf.names) == set(folder.names) == set(tensor_shapes(gguf.shape)) == set(written)
    for name, array in written.items():
        for weights in (gguf, folder):
            assert weights.tensor(name).dtype == np.float32
            np.testing.assert_array_equal(weights.tensor(name), array)


def test_what_is_encoded_lies_in_the_order_of_the_numbers(tmp_path: Path, tiny_model: Path) -> None:
    written = folder_weights("llama", tied=False)
    folder = open_weights(write_tiny_folder(tmp_path / "folder"))
    gguf = open_weights(write_as_gguf(tmp_path / "a.gguf", tiny_model, "llama", written))
    kept = open_weights(write_tiny_gguf(tmp_path / "q4.gguf", q4=True))
    encodings = {each.name: each for each in ENCODINGS.values()}
    for weights in (folder, gguf, kept):
        for name in weights.names:
            encoding, rows = encodings[weights.encoding(name)], weights.encoded(name)
            wanted = weights.tensor(name)
            assert rows.shape == (wanted.size // wanted.shape[-1], rows.shape[1])
            found = encoding.decode(rows.reshape(-1, encoding.size)).reshape(wanted.shape)
            np.testing.assert_array_equal(found, wanted)
    assert {kept.encoding(name) for name in kept.names} == {"F32", "Q4_1", "Q8_0"}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-3), ("bfloat16", 8e-3)])
@pytest.mark.parametrize("files", [1, 3])
def test_half_precision_and_several_files(
    tmp_path: Path, dtype: str, tolerance: float, files: int
) -> None:
    weights = open_weights(write_tiny_folder(tmp_path, dtype=dtype, files=files))
    for name, array in folder_weights().items():
        np.testing.assert_allclose(weights.tensor(name), array, rtol=tolerance, atol=1e-6)


def test_unknown_weight(tmp_path: Path, tiny_model: Path) -> None:
    for path in (tiny_model, write_tiny_folder(tmp_path)):
        with pytest.raises(ModelError, match="no tensor 'nothing'"):
            open_weights(path).tensor("nothing")


def test_K7_fingerprint_follows_every_weight(tmp_path: Path) -> None:
    found = set()
    for index, change in enumerate((0.0, 1e-3)):
        folder = write_tiny_folder(tmp_path / str(index))
        weights = folder_weights()
        weights["model.layers.1.mlp.down_proj.weight"][-1, -1] += change
        save_weights(folder, weights, "float32")
        found.add(open_weights(folder).fingerprint())
    found.add(open_weights(write_tiny_folder(tmp_path / "half", dtype="float16")).fingerprint())
    assert len(found) == 3
    assert open_weights(write_tiny_folder(tmp_path / "again")).fingerprint() in found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma"}, "model type 'gemma'"),
        ({"model_type": None}, "'model_type' is missing"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "scaled rotary"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "scaled rotary"),
        ({"rope_scaling": [1]}, "must be an object"),
        ({"num_key_value_heads": 3}, "don't divide"),
        ({"num_hidden_layers": 3}, "no tensor 'model.layers.2"),
        ({"num_hidden_layers": 1}, "unknown tensor 'model.layers.1"),
        ({"num_hidden_layers": "2"}, "must be int"),
        ({"num_hidden_layers": -1}, "above zero"),
        ({"num_hidden_layers": 10**12}, "can't be made of"),
        ({"vocab_size": 300}, "has shape"),
        ({"tie_word_embeddings": False}, "no tensor 'lm_head.weight'"),
    ],
)
def test_unsupported_folders_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write_tiny_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(folder_config() | change))
    with pytest.raises(ModelError, match=message):
        open_weights(tmp_path)


def test_a_folder_without_a_model_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="in it; a model is a GGUF file, or a folder"):
        open_weights(tmp_path)


def test_sliding_window_bounds_the_context(tmp_path: Path) -> None:
    write_tiny_folder(tmp_path, kind="mistral")
    config = folder_config("mistral") | {"sliding_window": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_weights(tmp_path).shape.context_tokens == 512


def test_a_copy_of_a_tied_head_is_left_out(tmp_path: Path) -> None:
    write_tiny_folder(tmp_path)
    weights = folder_weights()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    save_weights(tmp_path, weights, "float32")
    assert "lm_head.weight" not in open_weights(tmp_path).names


@pytest.mark.parametrize(
    ("extra", "tensors", "message"),
    [
        ({"general.architecture": "gemma2"}, {}, "architecture 'gemma2'"),
        ({"llama.expert_count": 8}, {}, "mixtures of experts"),
        ({"llama.rope.scaling.type": "yarn"}, {}, "scaled rotary"),
        ({"llama.rope.dimension_count": 8}, {}, "differs from the head size"),
        ({"llama.attention.head_count": 0}, {}, "above zero"),
        ({"llama.block_count": 2**31}, {}, "can't be made of"),
        ({}, {"rope_freqs.weight": np.ones(8, np.float32)}, "scaled rotary"),
        ({}, {"blk.0.attn_q.bias": np.ones(64, np.float32)}, "unknown tensor"),
    ],
)
def test_unsupported_gguf_is_refused(
    tmp_path: Path,
    tiny_model: Path,
    extra: dict[str, Any],
    tensors: dict[str, np.ndarray],
    message: str,
) -> None:
    file = GGUFFile(tiny_model)
    given = {name: file.tensor(name) for name in file.tensors} | tensors
    path = write_gguf(tmp_path / "a.gguf", file.metadata | extra, given)
    with pytest.raises(ModelError, match=message) as caught:
        open_weights(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: raw[:7],
        lambda raw: raw[:-1],
        lambda raw: struct.pack("<Q", 1 << 40) + raw[8:],
        lambda raw: raw[:8] + b"[" + raw[9:],
        lambda raw: raw.replace(b'"F32"', b'"F64"', 1),
        lambda raw: raw.replace(b"[64]", b"[-4]", 1),
        lambda raw: raw.replace(b'"dtype"', b'"dtyqe"', 1),
    ],
)
def test_damaged_safetensors_are_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = write_tiny_folder(tmp_path) / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        open_weights(tmp_path)


@settings(max_examples=100)
@given(at=st.integers(0, 600), byte=st.integers(0, 255))
def test_damage_gives_an_error_or_a_model(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    if not folder.exists():
        write_tiny_folder(folder)
        (folder / "model.safetensors").rename(folder / "whole")
    raw = bytearray((folder / "whole").read_bytes())
    raw[at] = byte
    (folder / "model.safetensors").write_bytes(raw)
    try:
        weights = open_weights(folder)
    except ModelError as error:
        assert str(folder) in str(error)  # noqa: PT017
    else:
        assert set(weights.names) == set(folder_weights())


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/hostname", "a/b.safetensors"])
def test_files_outside_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    write_tiny_folder(tmp_path)
    index = {"weight_map": {"model.norm.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="outside the folder"):
        open_weights(tmp_path)
