"""A random tiny model in a folder as Hugging Face lays it out: the tiny GGUF's twin in kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from tests.fakes.tiny_model import MERGES, SPECIALS, TEMPLATE, vocabulary

HIDDEN, HEADS, KV_HEADS, LAYERS = 64, 4, 2, 2


def folder_config(kind: str = "llama", tied: bool = True) -> dict[str, Any]:
    """What config.json says."""
    return {
        "model_type": kind,
        "hidden_act": "silu",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": len(vocabulary()) + 5,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
        "sliding_window": None,
    }


def folder_weights(kind: str = "llama", tied: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights by Hugging Face's names."""
    rng = np.random.default_rng(seed)
    kv_rows = HIDDEN // HEADS * KV_HEADS

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * 2 / columns**0.5).astype(np.float32)

    def vector(size: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    vocab = len(vocabulary()) + 5
    found = {
        "model.embed_tokens.weight": matrix(vocab, HIDDEN),
        "model.norm.weight": vector(HIDDEN),
    }
    if not tied:
        found["lm_head.weight"] = matrix(vocab, HIDDEN)
    for layer in range(LAYERS):
        part = {
            "input_layernorm.weight": vector(HIDDEN),
            "self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN),
            "self_attn.k_proj.weight": matrix(kv_rows, HIDDEN),
            "self_attn.v_proj.weight": matrix(kv_rows, HIDDEN),
            "self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
            "post_attention_layernorm.weight": vector(HIDDEN),
            "mlp.gate_proj.weight": matrix(2 * HIDDEN, HIDDEN),
            "mlp.up_proj.weight": matrix(2 * HIDDEN, HIDDEN),
            "mlp.down_proj.weight": matrix(HIDDEN, 2 * HIDDEN),
        }
        if kind == "qwen2":
            part["self_attn.q_proj.bias"] = vector(HIDDEN)
            part["self_attn.k_proj.bias"] = vector(kv_rows)
            part["self_attn.v_proj.bias"] = vector(kv_rows)
        if kind == "qwen3":
            part["self_attn.q_norm.weight"] = vector(HIDDEN // HEADS)
            part["self_attn.k_norm.weight"] = vector(HIDDEN // HEADS)
        found |= {f"model.layers.{layer}.{name}": array for name, array in part.items()}
    return found


def _save_file(path: Path, weights: dict[str, np.ndarray], dtype: str) -> None:
    """One safetensors file. NumPy has no bfloat16: cut float32 in half and correct the header."""
    if dtype != "bfloat16":
        save_file({name: array.astype(dtype) for name, array in weights.items()}, path)
        return
    cut = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in weights.items()}
    save_file(cut, path)
    raw = path.read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    header = raw[8:size].replace(b'"U16"', b'"BF16"')
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[size:])


def save_weights(folder: Path, weights: dict[str, np.ndarray], dtype: str, files: int = 1) -> None:
    """model.safetensors, or several files and their index."""
    if files == 1:
        _save_file(folder / "model.safetensors", weights, dtype)
        return
    homes = {name: f"model-{at % files:05}.safetensors" for at, name in enumerate(sorted(weights))}
    for file in set(homes.values()):
        part = {name: array for name, array in weights.items() if homes[name] == file}
        _save_file(folder / file, part, dtype)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))


def save_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, equal in effect to the tiny GGUF's metadata."""
    merges = [tuple(pair.split(" ")) for pair in MERGES]
    tokenizer = Tokenizer(BPE({text: token for token, text in enumerate(vocabulary())}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": SPECIALS[1],
        "eos_token": {"content": SPECIALS[2], "lstrip": False},
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_tiny_folder(
    folder: Path,
    *,
    kind: str = "llama",
    dtype: str = "float32",
    files: int = 1,
    tied: bool = True,
    seed: int = 0,
) -> Path:
    """A model of `kind` (llama, mistral, qwen2, qwen3) whose vocabulary is padded by 5."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(folder_config(kind, tied)))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    save_weights(folder, folder_weights(kind, tied, seed), dtype, files)
    save_tokenizer(folder)
    return folder
