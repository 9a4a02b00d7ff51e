"""Batches for attention backends, and a dense float64 reference that knows nothing of pages."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from replica.attention.base import HeadShape, PagedAttention
from replica.models.rope import RopeTable
from replica.runner.batch import ForwardBatch, build_batch
from replica.runner.pool import KVPool, LayerCache
from replica.sched.plan import ChildId, PlanRow

BLOCK_TOKENS = 16
BLOCKS = 64
CONTEXT_TOKENS = 512

SHAPES = [
    HeadShape(9, 3, 64),
    HeadShape(4, 4, 32),
    HeadShape(8, 1, 64),
    HeadShape(6, 2, 96),
    HeadShape(8, 2, 128),
]

# (start, new tokens) of each row
ROWS = {
    "decode": [(0, 1), (15, 1), (16, 1), (31, 1), (100, 1), (7, 1)],
    "long decode": [(255, 1), (256, 1), (470, 1)],
    "ragged prefill": [(0, 1), (0, 16), (0, 17), (0, 77), (0, 15)],
    "chunk on a prefix": [(16, 16), (5, 30), (64, 33), (97, 64)],
    "mixed": [(40, 1), (0, 50), (16, 20), (3, 1)],
}

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """A pool whose every number is NaN but what was stored, and one batch over it."""

    shape: HeadShape
    dtype: torch.dtype
    cache: LayerCache
    batch: ForwardBatch
    qkv: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    rope: RopeTable


def _rows(spans: list[tuple[int, int]]) -> list[PlanRow]:
    """Plan rows in batch order, over blocks in no order."""
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    rows = []
    for child, (start, count) in enumerate(sorted(spans, key=lambda span: span[1] > 1)):
        needed = -(-(start + count) // BLOCK_TOKENS)
        blocks = tuple(order.pop() for _ in range(needed))
        rows.append(PlanRow(ChildId(child), 0, start, (5,) * count, blocks, None))
    return rows


def build_case(
    shape: HeadShape, spans: list[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> Case:
    """Store a random past for each row; the batch's own keys and values come with `qkv`."""
    rows = _rows(spans)
    pool = KVPool(
        layers=1,
        blocks=BLOCKS,
        block_tokens=BLOCK_TOKENS,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        device=device,
    )
    cache = pool.layers[0]
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("nan"))
    random = torch.Generator().manual_seed(1)
    keys, values = [], []
    for row in rows:
        past = torch.randn(2, row.start, shape.kv_heads, shape.head_dim, generator=random).to(dtype)
        keys.append(past[0])
        values.append(past[1])
        for position in range(row.start):
            block = row.block_ids[position // BLOCK_TOKENS]
            cache.keys[block, position % BLOCK_TOKENS] = past[0, position].to(device)
            cache.values[block, position % BLOCK_TOKENS] = past[1, position].to(device)
    batch = build_batch(
        rows,
        blocks=BLOCKS,
        block_tokens=BLOCK_TOKENS,
        context_tokens=CONTEXT_TOKENS,
        vocab=10,
        device=device,
    )
    qkv = torch.randn(len(batch.token_ids), shape.packed, generator=random).to(dtype)
    rope = RopeTable.build(CONTEXT_TOKENS, shape.head_dim, 10_000.0, device)
    return Case(shape, dtype, cache, batch, qkv, keys, values, rope)


def rotated(x: Tensor, positions: Tensor, head_dim: int) -> Tensor:
    """Rotation by complex numbers, float64: another way to the same end."""
    pairs = torch.complex(*x.double().chunk(2, dim=-1))
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2).double() / head_dim)
    turn = torch.polar(
        torch.ones(len(x), head_dim // 2).double(), positions.double()[:, None] * frequencies
    )
    turned = pairs * turn[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)


def expected(case: Case) -> Tensor:
    """[T, heads * head_dim] in float64, row by row and query by query."""
    shape, starts = case.shape, case.batch.host_starts.tolist()
    sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
    query, key, value = case.qkv.unflatten(1, (-1, shape.head_dim)).split(sizes, dim=1)
    positions = case.batch.positions.cpu()
    query, key = (rotated(part, positions, shape.head_dim) for part in (query, key))
    out = []
    for row, (first, last) in enumerate(itertools.pairwise(starts)):
        keys = torch.cat((case.keys[row], key[first:last])).double()
        values = torch.cat((case.values[row], value[first:last])).double()
        keys, values = (part.repeat_interleave(shape.group, dim=1) for part in (keys, values))
        for token in range(first, last):
            seen = positions[token] + 1
            scores = torch.einsum("hd,khd->hk", query[token].double(), keys[:seen])
            weights = (scores / shape.head_dim**0.5).softmax(-1)
            out.append(torch.einsum("hk,khd->hd", weights, values[:seen]).flatten())
    return torch.stack(out)


def check(backend: PagedAttention, case: Case, device: torch.device) -> None:
    """The backend's result for the case is right, and so is what it stored."""
    wanted = expected(case)
    query = backend.rotate_and_store(case.qkv.clone().to(device), case.rope, case.cache, case.batch)
    found = backend.attend(query, case.cache, case.batch)
    assert found.shape == wanted.shape
    assert found.dtype == case.dtype
    torch.testing.assert_close(
        found.double().cpu(), wanted, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype]
    )
    stored = case.cache.keys.flatten(0, 1).isfinite().all(-1).all(-1)
    positions = int(case.batch.host_contexts.sum())
    assert int(stored.sum()) == positions
    assert not stored[case.batch.slots.max() + 1 :][-BLOCK_TOKENS:].any()
