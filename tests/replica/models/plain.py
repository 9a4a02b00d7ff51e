"""The model over torch's attention, with a pool of KV: what others are compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from configs.model.shape import ModelShape
from configs.model.weights import Weights
from replica.attention.base import HeadShape, PagedAttention
from replica.attention.torch_paged import TorchPagedAttention
from replica.models.kernels import Kernels
from replica.models.llama import Llama
from replica.models.load import load_llama
from replica.models.rope import RopeTable
from replica.models.torch_kernels import TorchKernels
from replica.runner.pool import KVPool

CPU = torch.device("cpu")


def plain_llama(
    source: Weights,
    shape: ModelShape,
    blocks: int,
    block_tokens: int,
    kernels: Kernels | None = None,
    dtype: torch.dtype = torch.float32,
    attention: Callable[[HeadShape], PagedAttention] = TorchPagedAttention,
) -> tuple[Llama, KVPool]:
    """Plain torch, unless others are given; so many blocks besides the one for padding."""
    kernels = kernels or TorchKernels(shape.rms_eps)
    model = Llama(
        load_llama(source, kernels, dtype, CPU),
        RopeTable.build(shape.context_tokens, shape.head_dim, shape.rope_theta, CPU),
        attention(HeadShape(shape.heads, shape.kv_heads, shape.head_dim)),
        kernels,
    )
    pool = KVPool(
        layers=shape.layers,
        blocks=blocks,
        block_tokens=block_tokens,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        device=CPU,
    )
    return model, pool
