"""Random weights behind the loader's interface, and a dense float64 forward pass over them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.model.shape import ModelShape, tensor_shapes
from tests.replica.attention.cases import rotated


def small_shape(**changes: object) -> ModelShape:
    """A shape that every backend can run."""
    sizes: dict[str, object] = {
        "arch": "llama",
        "layers": 2,
        "hidden": 64,
        "intermediate": 112,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "vocab": 90,
        "rope_theta": 10_000.0,
        "rms_eps": 1e-5,
        "context_tokens": 256,
        "tied_head": True,
    }
    return ModelShape(**{**sizes, **changes})  # type: ignore[arg-type]


class RandomWeights:
    """See configs.model.weights.Weights."""

    def __init__(self, shape: ModelShape, seed: int = 0) -> None:
        self.shape = shape
        rng = np.random.default_rng(seed)
        self._tensors = {
            name: (rng.standard_normal(size) * 0.2 + (1.0 if "norm" in name else 0.0)).astype(
                np.float32
            )
            for name, size in tensor_shapes(shape).items()
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def tensor(self, name: str) -> NDArray[np.float32]:
        array = self._tensors[name].view()
        array.flags.writeable = False
        return array

    def encoding(self, name: str) -> str:
        return "F32"

    def encoded(self, name: str) -> NDArray[np.uint8]:
        array = self.tensor(name)
        return array.reshape(-1, array.shape[-1]).view(np.uint8)

    def fingerprint(self) -> str:
        return "00"


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def dense_logits(source: RandomWeights, token_ids: list[int]) -> Tensor:
    """Logits [tokens, vocab] in float64, without cache, pages or batches."""
    shape, eps = source.shape, source.shape.rms_eps
    get = {name: torch.from_numpy(source.tensor(name).copy()).double() for name in source.names}
    positions = torch.arange(len(token_ids))
    future = torch.ones(len(token_ids), len(token_ids), dtype=torch.bool).triu(1)
    hidden = get["model.embed_tokens.weight"][token_ids]
    for index in range(shape.layers):
        layer = f"model.layers.{index}"
        x = _norm(hidden, get[f"{layer}.input_layernorm.weight"], eps)
        parts = []
        for part in ("q", "k", "v"):
            name = f"{layer}.self_attn.{part}"
            y = x @ get[f"{name}_proj.weight"].T + get.get(f"{name}_proj.bias", torch.zeros(1))
            y = y.unflatten(1, (-1, shape.head_dim))
            if f"{name}_norm.weight" in get:
                y = _norm(y, get[f"{name}_norm.weight"], eps)
            parts.append(y if part == "v" else rotated(y, positions, shape.head_dim))
        query, key, value = parts
        key, value = (y.repeat_interleave(shape.heads // shape.kv_heads, 1) for y in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / shape.head_dim**0.5
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
        hidden = hidden + mixed @ get[f"{layer}.self_attn.o_proj.weight"].T
        x = _norm(hidden, get[f"{layer}.post_attention_layernorm.weight"], eps)
        gate, up = (x @ get[f"{layer}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        hidden = hidden + (gate * gate.sigmoid() * up) @ get[f"{layer}.mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if shape.tied_head else "lm_head.weight"
    return _norm(hidden, get["model.norm.weight"], eps) @ get[head].T
