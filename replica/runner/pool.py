"""The paged KV pool: the only place where KV lives on the device.

One tensor per layer, [2, blocks + 1, block_tokens, kv_heads, head_dim]; index 0 holds the keys,
index 1 the values. The last block is the dump: padding reads and writes go there and nowhere else.
Who owns which block is the scheduler's business.
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
        shape = (2, blocks + 1, block_tokens, kv_heads, head_dim)
        tensors = [_zeros(shape, dtype, device) for _ in range(layers)]
        self.layers = tuple(LayerCache(kv[0], kv[1]) for kv in tensors)
