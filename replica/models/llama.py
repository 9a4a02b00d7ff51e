"""The Llama family, written in the order in which it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from replica.attention.base import PagedAttention
from replica.models.linear import Linear
from replica.models.ops import Ops
from replica.models.rope import RopeTable
from replica.runner.batch import ForwardBatch
from replica.runner.pool import LayerCache


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. `qkv` and `gate_up` are stacked along their outputs; norms are float32.

    `head_norm`, where the model has one, is [heads + kv_heads, head_dim]: queries, then keys.
    `next_norm` is the norm behind the layer: the next layer's attention norm, or the final one.
    """

    qkv: Linear
    head_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    next_norm: Tensor


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """`embedding` is [vocab, hidden] in the model's dtype; `first_norm` is layer 0's."""

    embedding: Tensor
    first_norm: Tensor
    layers: tuple[LayerWeights, ...]
    head: Linear


class Llama:
    """A decoder over the paged pool. The residual stream is float32."""

    def __init__(
        self,
        weights: LlamaWeights,
        rope: RopeTable,
        attention: PagedAttention,
        ops: Ops,
    ) -> None:
        self._weights = weights
        self._rope = rope
        self._attention = attention
        self._ops = ops

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        """Write the batch's KV; give the normed state of each row's last token, [R, hidden]."""
        weights = self._weights
        embedded = weights.embedding[batch.token_ids]
        hidden = embedded.float()
        normed = self._ops.norm(hidden, weights.first_norm, embedded.dtype)
        for layer, cache in zip(weights.layers, caches, strict=True):
            qkv = layer.qkv(normed)
            if layer.head_norm is not None:
                self._ops.head_norm(qkv, layer.head_norm)
            query = self._attention.rotate_and_store(qkv, self._rope, cache, batch)
            if layer is weights.layers[-1]:
                query, hidden, batch = query[batch.last], hidden[batch.last], batch.last_only()
            attended = layer.output(self._attention.attend(query, cache, batch))
            normed = self._ops.add_norm(hidden, attended, layer.mlp_norm)
            mixed = layer.down(self._ops.silu_mul(layer.gate_up(normed)))
            normed = self._ops.add_norm(hidden, mixed, layer.next_norm)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [S, vocab] of normed states [S, hidden]."""
        return self._weights.head(hidden).float()
