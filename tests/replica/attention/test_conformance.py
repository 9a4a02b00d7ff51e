"""Every attention backend against the dense reference, over a pool full of NaN."""

from __future__ import annotations

import itertools

import pytest
import torch

from configs.native import CompileError
from replica.attention.base import HeadShape, PagedAttention
from replica.attention.cpu_native import NativePagedAttention
from replica.attention.torch_paged import TorchPagedAttention
from replica.native.library import load_library
from replica.runner.batch import ForwardBatch
from tests.replica.attention.cases import (
    BLOCKS,
    ROWS,
    SHAPES,
    build_case,
    check,
)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def make(name: str, shape: HeadShape) -> PagedAttention:
    if name == "torch":
        return TorchPagedAttention(shape)
    try:
        library = load_library()
    except CompileError as error:
        pytest.skip(f"no native kernels here: {error}")
    if name == "native by tiles" and not library.wr_tiles():
        pytest.skip("this CPU, or its kernel, has no AMX for us")
    return NativePagedAttention(shape, library, tiles=name == "native by tiles")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.heads}/{shape.kv_heads}")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*itertools.product(["torch", "native"], DTYPES), ("native by tiles", torch.bfloat16)],
    ids=str,
)
def test_conforms(name: str, shape: HeadShape, rows: str, dtype: torch.dtype) -> None:
    check(make(name, shape), build_case(shape, ROWS[rows], dtype, CPU), CPU)


@pytest.mark.parametrize("name", ["torch", "native"])
def test_padding_rows_touch_nothing_but_the_dump(name: str) -> None:
    shape = SHAPES[0]
    backend = make(name, shape)
    case = build_case(shape, [(20, 1), (33, 1)], torch.float32, CPU)
    alone = backend.attend(
        backend.rotate_and_store(case.qkv.clone(), case.rope, case.cache, case.batch),
        case.cache,
        case.batch,
    )
    before = case.cache.keys.clone()
    batch, dump = case.batch, BLOCKS
    wide = torch.full((1, batch.block_tables.shape[1]), dump, dtype=torch.int32)
    starts = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    contexts = torch.cat((batch.contexts, torch.tensor([1], dtype=torch.int32)))
    padded = ForwardBatch(
        token_ids=torch.cat((batch.token_ids, torch.zeros(1, dtype=torch.int64))),
        positions=torch.cat((batch.positions, torch.zeros(1, dtype=torch.int64))),
        slots=torch.cat((batch.slots, torch.tensor([dump * 16]))),
        block_tables=torch.cat((batch.block_tables, wide)),
        starts=starts,
        contexts=contexts,
        host_starts=starts,
        host_contexts=contexts,
        last=torch.tensor([0, 1, 2]),
        singles=3,
    )
    qkv = torch.cat((case.qkv, torch.full_like(case.qkv[:1], 7.0)))
    found = backend.attend(
        backend.rotate_and_store(qkv, case.rope, case.cache, padded), case.cache, padded
    )
    torch.testing.assert_close(found[:2], alone, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        case.cache.keys[:dump], before[:dump], rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_native_kernel_gives_a_row_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    shape = SHAPES[0]
    backend = make("native", shape)
    case = build_case(shape, [(40, 9), (0, 50), (16, 20)], dtype, CPU)
    query = backend.rotate_and_store(case.qkv.clone(), case.rope, case.cache, case.batch)
    together = backend.attend(query, case.cache, case.batch)
    last = backend.attend(query[case.batch.last], case.cache, case.batch.last_only())
    assert torch.equal(together[case.batch.last], last)


def test_tiles_give_a_single_token_the_same_bits_in_any_batch() -> None:
    shape = SHAPES[0]
    backend = make("native by tiles", shape)
    case = build_case(shape, [(40, 1), (260, 1), (0, 50)], torch.bfloat16, CPU)
    query = backend.rotate_and_store(case.qkv.clone(), case.rope, case.cache, case.batch)
    together = backend.attend(query, case.cache, case.batch)
    last = backend.attend(query[case.batch.last], case.cache, case.batch.last_only())
    assert torch.equal(together[:2], last[:2])


def test_tiles_give_the_same_bits_however_the_work_is_shared_out() -> None:
    """One thread takes a row's heads together, two take them one by one where rows are few."""
    shape = SHAPES[0]
    backend = make("native by tiles", shape)
    case = build_case(shape, [(40, 1), (470, 1), (15, 1)], torch.bfloat16, CPU)
    query = backend.rotate_and_store(case.qkv.clone(), case.rope, case.cache, case.batch)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(backend.attend(query, case.cache, case.batch))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_unfit_shapes_are_declined() -> None:
    assert not NativePagedAttention.supports(HeadShape(4, 2, 16))
    assert not NativePagedAttention.supports(HeadShape(64, 1, 64))
    assert NativePagedAttention.supports(HeadShape(9, 3, 64))
