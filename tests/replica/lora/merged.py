"""A runner over weights with an adapter merged in: the plain reference."""

from __future__ import annotations

from pathlib import Path

import torch

from configs.model.adapter import AdapterFile
from configs.model.card import ModelCard
from configs.model.weights import open_weights
from replica.attention.base import HeadShape
from replica.attention.torch_paged import TorchPagedAttention
from replica.models.llama import Llama
from replica.models.load import load_llama
from replica.models.rope import RopeTable
from replica.models.torch_kernels import TorchKernels
from replica.runner.pool import KVPool
from replica.runner.runner import ModelRunner
from tests.fakes.adapters import MergedWeights

CPU = torch.device("cpu")


def merged_runner(card: ModelCard, adapter: Path, block_tokens: int = 8) -> ModelRunner:
    """Plain torch, float32, no adapters."""
    shape = card.shape
    kernels = TorchKernels(shape.rms_eps)
    source = MergedWeights(open_weights(card.path), AdapterFile(adapter, shape))
    model = Llama(
        load_llama(source, kernels, torch.float32, CPU),
        RopeTable.build(shape.context_tokens, shape.head_dim, shape.rope_theta, CPU),
        TorchPagedAttention(HeadShape(shape.heads, shape.kv_heads, shape.head_dim)),
        kernels,
    )
    pool = KVPool(
        layers=shape.layers,
        blocks=64,
        block_tokens=block_tokens,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=torch.float32,
        device=CPU,
    )
    context = shape.context_tokens
    return ModelRunner(
        model, pool, vocab=shape.vocab, context_tokens=context, device=CPU, threads=1
    )
