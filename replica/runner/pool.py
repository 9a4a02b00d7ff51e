"""The paged KV pool: the only place where KV lives on the device.

One tensor, [layers, 2, blocks + 1, block_tokens, kv_heads, head_dim]: keys, then values. The last
block is the dump: padding reads and writes go there and nowhere else. Who owns which block is the
scheduler's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, each [blocks + 1, block_tokens, kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU their memory is not touched before it is used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(shape, np.uint16 if dtype.itemsize == 2 else np.uint32)
    return torch.from_numpy(raw).view(dtype)


class KVPool:
    """`blocks` usable blocks plus the dump, for every layer."""

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.dump = blocks
        shape = (layers, 2, blocks + 1, block_tokens, kv_heads, head_dim)
        self.kv = _zeros(shape, dtype, device)
        self.layers = tuple(LayerCache(layer[0], layer[1]) for layer in self.kv)
