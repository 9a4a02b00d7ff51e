"""The forward pass stays on its device: torch's `meta` device has shapes and no numbers, and any
operation that mixes it with another device fails, as it would on CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from configs.model.card import load_card
from configs.model.weights import open_weights
from replica.attention.base import HeadShape
from replica.attention.torch_paged import TorchPagedAttention
from replica.models.llama import Llama
from replica.models.load import load_llama
from replica.models.rope import RopeTable
from replica.models.torch_kernels import TorchKernels
from replica.runner.batch import build_batch
from replica.runner.pool import KVPool
from replica.sched.plan import ChildId, PlanRow

META = torch.device("meta")
DECODE = PlanRow(
    child=ChildId(0), incarnation=0, start=20, token_ids=(5,), block_ids=(10, 11), sample=None
)
PREFILL = PlanRow(
    child=ChildId(1), incarnation=0, start=16, token_ids=(1,) * 24, block_ids=(0, 1, 2), sample=None
)


@pytest.mark.parametrize("rows", [(DECODE,), (PREFILL,), (DECODE, PREFILL)], ids=len)
def test_forward_mixes_no_devices(tiny_model: Path, rows: tuple[PlanRow, ...]) -> None:
    card = load_card(tiny_model)
    shape, kernels = card.shape, TorchKernels(card.shape.rms_eps)
    model = Llama(
        load_llama(open_weights(card.path), kernels, torch.bfloat16, META),
        RopeTable.build(64, shape.head_dim, shape.rope_theta, META),
        TorchPagedAttention(HeadShape(shape.heads, shape.kv_heads, shape.head_dim)),
        kernels,
    )
    pool = KVPool(
        layers=shape.layers,
        blocks=16,
        block_tokens=16,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=torch.bfloat16,
        device=META,
    )
    batch = build_batch(
        rows, blocks=16, block_tokens=16, context_tokens=64, vocab=shape.vocab, device=META
    )
    logits = model.logits(model.forward(batch, pool.layers))
    assert (logits.device, logits.shape) == (META, (len(rows), shape.vocab))
