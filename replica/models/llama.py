"""The Llama family, written in the order in which it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replica.attention.base import PagedAttention
from replica.lora.apply import DOWN, OUTPUT, QKV, additions, gate
from replica.models.kernels import Embedding, GatedLinear, Kernels, Linear
from replica.models.rope import RopeTable
from replica.runner.batch import ForwardBatch
from replica.runner.pool import LayerCache


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. `qkv` holds the three projections side by side; norms are float32.

    `head_norm`, where the model has one, is [heads + kv_heads, head_dim]: queries, then keys.
    """

    attention_norm: Tensor
    qkv: Linear
    head_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gated: GatedLinear
    down: Linear


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """`dtype` is the model's."""

    dtype: torch.dtype
    embedding: Embedding
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Linear


class Llama:
    """A decoder over the paged pool. The residual stream is float32."""

    def __init__(
        self,
        weights: LlamaWeights,
        rope: RopeTable,
        attention: PagedAttention,
        kernels: Kernels,
    ) -> None:
        self._weights = weights
        self._rope = rope
        self._attention = attention
        self._kernels = kernels

    def forward(
        self, batch: ForwardBatch, caches: Sequence[LayerCache], every: bool = False
    ) -> Tensor:
        """Write the batch's KV; give the normed state of each row's last token, [R, hidden], or of
        `every` token, [T, hidden]."""
        weights, kernels = self._weights, self._kernels
        dtype, singles = weights.dtype, batch.singles
        hidden = weights.embedding(batch.token_ids)
        adapters = additions(batch.spans, kernels)
        for index, (layer, cache) in enumerate(zip(weights.layers, caches, strict=True)):
            states = kernels.norm(hidden, layer.attention_norm, dtype)
            qkv = layer.qkv(states, singles)
            adapters.add(index, QKV, states, qkv)
            if layer.head_norm is not None:
                kernels.head_norm(qkv, layer.head_norm)
            query = self._attention.rotate_and_store(qkv, self._rope, cache, batch)
            if layer is weights.layers[-1] and not every:
                query, hidden, batch = query[batch.last], hidden[batch.last], batch.last_only()
                adapters = adapters.last_only()
            attended = self._attention.attend(query, cache, batch)
            layer.output.add_to(hidden, attended, singles)
            adapters.add(index, OUTPUT, attended, hidden)
            states = kernels.norm(hidden, layer.mlp_norm, dtype)
            inner = gate(adapters, index, layer.gated, states, singles)
            layer.down.add_to(hidden, inner, singles)
            adapters.add(index, DOWN, inner, hidden)
        return kernels.norm(hidden, weights.final_norm, dtype)

    def logits(self, hidden: Tensor, singles: int = 0) -> Tensor:
        """float32 [S, vocab] of normed states [S, hidden], the first of `singles`."""
        return self._weights.head.floats(hidden, singles)
