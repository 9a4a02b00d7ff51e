"""Rotary position embedding: the table of cosines and sines, and how it turns a vector."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin, float32 [positions, head_dim / 2]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def build(cls, positions: int, head_dim: int, theta: float, device: torch.device) -> RopeTable:
        """The table for positions 0 to `positions` - 1."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / (theta**exponents)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        return cls(angles.cos().to(device), angles.sin().to(device))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [tokens, heads, head_dim] by cos, sin [tokens, head_dim / 2], halves paired."""
    left, right = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)
