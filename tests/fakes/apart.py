"""A device of its own without its hardware: tensors that torch places on `apart:0`.

Their numbers live in host memory, but nothing may read them there: an operation that mixes them
with the host's tensors fails as it would on CUDA, and so does `numpy()`. What runs here finds every
tensor where it belongs; what only real hardware has (streams, its own kernels' rounding) stays out.
Built on torch's hooks for backends written in Python (`torch.utils.backend_registration`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
CROSSING = {aten._to_copy.default, aten.copy_.default}
"""The only operations that may see tensors of both sides."""


class Apart(Tensor):
    """A tensor of the device; `held` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Apart:
        made = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device("apart:0"),
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of `apart_device()`")

    def tolist(self) -> Any:
        """Torch refuses it for subclasses; on a device it is a copy to the host."""
        return self.held.tolist()


class _Dispatch(TorchDispatchMode):
    """Runs each operation on what its tensors hold, and puts the outcome where it belongs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        ours = [tensor for tensor in tensors if isinstance(tensor, Apart)]
        hosts = [tensor for tensor in tensors if tensor.dim() and not isinstance(tensor, Apart)]
        if ours and hosts and func not in CROSSING:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        there = bool(ours) and func is not aten._local_scalar_dense.default
        if kwargs.get("device") is not None:
            there = torch.device(kwargs["device"]).type == "apart"
            kwargs["device"] = torch.device("cpu")
        plain_args, plain_kwargs = tree_map(_held, (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        known = {id(tensor.held): tensor for tensor in ours}

        def placed(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in known:
                return known[id(leaf)]
            return Apart(leaf) if there else leaf

        return tree_map(placed, out)


def _held(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, Apart) else leaf


def _empty_strided(
    size: Any,
    stride: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Tensor:
    return Apart(torch.empty_strided(size, stride, dtype=dtype))


def _copy(into: Apart, source: Tensor, non_blocking: bool = False) -> Tensor:
    into.held.copy_(source)
    return into


@cache
def _register() -> torch.library.Library:
    """Once a process. `torch.tensor(..., device=...)` goes past modes: it needs two kernels."""
    backend_registration._setup_privateuseone_for_python_backend("apart")
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("copy_", _copy, "PrivateUse1")
    return library


@contextmanager
def apart_device() -> Iterator[str]:
    """The name of the device, which this thread can use inside."""
    _register()
    with _Dispatch():
        yield "apart:0"
