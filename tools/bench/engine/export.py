"""A model as a Hugging Face folder, for engines that don't read the file that we do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from configs.model.shape import ModelShape
from configs.model.weights import open_weights

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ALIGN_BYTES = 8


def export(model: Path, folder: Path) -> None:
    """Write `config.json` and bfloat16 `model.safetensors`. Raises ModelError."""
    shape = open_weights(model).shape
    (folder / "config.json").write_text(json.dumps(config_of(shape), indent=2))
    write_weights(model, folder)


def write_weights(model: Path, folder: Path) -> None:
    """Only `model.safetensors`, in bfloat16. Raises ModelError."""
    weights = open_weights(model)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in weights.names:
        size = weights.tensor(name).size * 2
        shape = list(weights.tensor(name).shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGN_BYTES)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for chunk in (rounded(weights.tensor(name)) for name in weights.names):
            file.write(chunk.tobytes())


def rounded(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bfloat16 bits, to nearest even. Weights are finite."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def config_of(shape: ModelShape) -> dict[str, object]:
    """What transformers and vLLM read."""
    return {
        "architectures": [_ARCHITECTURES[shape.arch]],
        "model_type": shape.arch,
        "torch_dtype": "bfloat16",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_eps,
        "max_position_embeddings": shape.context_tokens,
        "tie_word_embeddings": shape.tied_head,
        "attention_bias": shape.qkv_bias,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
    }
