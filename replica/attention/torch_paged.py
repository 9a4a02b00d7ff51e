"""Paged attention in plain torch: the oracle of the other backends, and the fallback on any device.

Rows with one token go through one padded call, longer rows through one call each.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from replica.attention.base import PagedAttention
from replica.models.rope import RopeTable, rotate
from replica.runner.batch import ForwardBatch
from replica.runner.pool import LayerCache


class TorchPagedAttention(PagedAttention):
    """Gather the pages, then torch's own attention."""

    name = "torch"

    def rotate_and_store(
        self, qkv: Tensor, rope: RopeTable, cache: LayerCache, batch: ForwardBatch
    ) -> Tensor:
        shape = self.shape
        sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
        query, key, value = qkv.view(len(qkv), -1, shape.head_dim).split(sizes, dim=1)
        cos, sin = rope.cos[batch.positions], rope.sin[batch.positions]
        cache.keys.flatten(0, 1).index_copy_(0, batch.slots, rotate(key, cos, sin))
        cache.values.flatten(0, 1).index_copy_(0, batch.slots, value)
        return rotate(query, cos, sin)

    def attend(self, query: Tensor, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        starts, contexts = batch.host_starts.tolist(), batch.host_contexts.tolist()
        singles = 0
        while singles < batch.rows and starts[singles + 1] - starts[singles] == 1:
            singles += 1
        parts = []
        if singles:
            width = max(contexts[:singles])
            parts.append(self._single(query[:singles], width, cache, batch))
        for row in range(singles, batch.rows):
            rows = query[starts[row] : starts[row + 1]]
            parts.append(self._chunk(rows, contexts[row], cache, batch.block_tables[row]))
        return torch.cat(parts).flatten(1)

    def _single(self, query: Tensor, width: int, cache: LayerCache, batch: ForwardBatch) -> Tensor:
        """One query a row; the heads of a group stand where queries of a sequence would.

        Stale numbers behind a row's context are replaced before use.
        """
        rows = len(query)
        blocks = -(-width // cache.keys.shape[1])
        tables = batch.block_tables[:rows, :blocks].long()
        inside = torch.arange(width, device=query.device) < batch.contexts[:rows, None]
        keys, values = (
            pages[tables]
            .flatten(1, 2)[:, :width]
            .masked_fill(~inside[:, :, None, None], 0.0)
            .transpose(1, 2)
            for pages in (cache.keys, cache.values)
        )
        grouped = query.unflatten(1, (self.shape.kv_heads, self.shape.group))
        mask = inside[:, None, None, :]
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).flatten(1, 2)

    def _chunk(self, query: Tensor, context: int, cache: LayerCache, table: Tensor) -> Tensor:
        """Several queries of one row over exactly its own context."""
        count = len(query)
        blocks = table[: -(-context // cache.keys.shape[1])].long()
        keys, values = (
            pages[blocks].flatten(0, 1)[None, :context].transpose(1, 2)
            for pages in (cache.keys, cache.values)
        )
        mask = None
        if count < context:
            mask = torch.ones(count, context, dtype=torch.bool, device=query.device)
            mask = mask.tril(context - count)
        out = scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        return out.squeeze(0).transpose(0, 1)
