"""A matrix product with constant weights, prepared once for the device that it runs on.

On a CPU the weights are laid out for oneDNN ahead of time, since plain `linear` does that again on
every call; where this torch can't, plain `linear` it is.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.nn.functional import linear

log = logging.getLogger(__name__)

_ROWS_HINT = 64
"""How many input rows the layout is made for; measured to matter little from 1 to 512."""


def _prepack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's own layout, or None where that is not to be had."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        probe = torch.zeros(2, weight.shape[1], dtype=weight.dtype)
        torch.ops.mkldnn._linear_pointwise(probe, packed, None, "none", [], "")
    except (AttributeError, RuntimeError) as error:
        log.warning("weights are not laid out ahead of time: %s", error)
        return None
    return packed


class Linear:
    """y = x @ weight.T + bias for weight [out, in]; x is [rows, in] in the same dtype."""

    __slots__ = ("_bias", "_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = _prepack(weight)
        self._weight = weight if self._packed is None else None
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return linear(x, self._weight, self._bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
