"""Memory for weights in huge pages: a decode step reads all of them, and with small pages the CPU
spends a tenth of that time on looking up where they lie.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_CHUNK_BYTES = 32 << 20
_SMALL_BYTES = 1 << 19
"""What is less gets memory of its own: adapters come and go, and would keep whole chunks alive."""

_LINE_BYTES = 64


class Room:
    """Hands out chunks piece by piece. A chunk is freed when none of its pieces is in use."""

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """As `torch.zeros_like`, contiguous, at the begin of a cache line."""
        size = tensor.numel() * tensor.element_size()
        if size < _SMALL_BYTES:
            return torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        if size > len(self._free):
            # numpy asks for huge pages where it allocates this much.
            chunk = np.zeros(max(size, _CHUNK_BYTES) + _LINE_BYTES, np.uint8)
            self._free = chunk[-chunk.ctypes.data % _LINE_BYTES :]
        piece = self._free[:size]
        self._free = self._free[-(-size // _LINE_BYTES) * _LINE_BYTES :]
        return torch.from_numpy(piece).view(tensor.dtype).view(tensor.shape)
