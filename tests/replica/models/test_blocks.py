"""Weights kept as a file's blocks: what they stand for to the bit, and products with them: those of
the numbers to the bit, or, of few rows by tiles, of numbers that nothing has rounded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.model.quant import ENCODINGS
from configs.native import cpu_flags
from replica.models.blocks import DECODERS, BlockMatrix
from replica.models.kernels import Kernels, Linear
from tests.replica.models.test_kernels import DTYPES, close, make, numbers

NATIVE = ["native", "native by tiles"]
SIZES = [(32, 1), (64, 96), (576, 50)]
ROWS = [1, 2, 8, 9, 16, 17, 33, 150, 300]
BF16 = torch.bfloat16


def blocks(
    rows: int, columns: int, encoding: str, dtype: torch.dtype, scale_bits: int = 0x3FFF
) -> BlockMatrix:
    """Random bytes, but for scales and least values that are finite (and small by default)."""
    size, _ = DECODERS[encoding]
    generator = np.random.default_rng(rows + columns)
    raw = generator.integers(0, 256, (rows * columns // 32, size), np.uint8)
    halves = 2 if encoding == "Q4_1" else 1
    view = raw[:, : 2 * halves].copy().view("<u2")
    raw[:, : 2 * halves] = (view & (0x8000 | scale_bits) & 0xB0FF).view(np.uint8)
    return BlockMatrix(torch.from_numpy(raw.reshape(rows, -1)), encoding, dtype)


def every_half(encoding: str, dtype: torch.dtype) -> BlockMatrix:
    """Each finite float16 as a scale, normal or not, with one of the others as least value."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    halves = halves[(halves & 0x7C00) != 0x7C00]
    size, _ = DECODERS[encoding]
    raw = np.random.default_rng(1).integers(0, 256, (len(halves), size), np.uint8)
    raw[:, :2] = halves.view(np.uint8).reshape(-1, 2)
    if encoding == "Q4_1":
        raw[:, 2:4] = np.roll(halves, 777).view(np.uint8).reshape(-1, 2)
    return BlockMatrix(torch.from_numpy(raw), encoding, dtype)


@pytest.mark.parametrize("encoding", DECODERS)
def test_torch_decodes_as_the_reader_does(encoding: str) -> None:
    matrix = every_half(encoding, torch.float32)
    (reader,) = (each for each in ENCODINGS.values() if each.name == encoding)
    assert torch.equal(matrix.dense(), torch.from_numpy(reader.decode(matrix.data.numpy())))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("encoding", DECODERS)
def test_packed_blocks_stand_for_the_same_numbers_to_the_bit(
    encoding: str, dtype: torch.dtype
) -> None:
    matrix = every_half(encoding, dtype)
    ids = torch.randperm(len(matrix.data), generator=torch.Generator().manual_seed(3))
    found = make("native").embedding(matrix)(ids)
    assert found.dtype == torch.float32
    assert torch.equal(found, matrix.dense()[ids].float())


def multiplies_blocks(name: str, encoding: str, dtype: torch.dtype) -> bool:
    """Whether the tiles multiply the blocks themselves, for single tokens."""
    kept = encoding == "Q4_1" or "avx512_fp16" in cpu_flags()
    return name == "native by tiles" and dtype == BF16 and kept


def linears(kernels: Kernels, matrix: BlockMatrix, bias: Tensor) -> tuple[Linear, Linear]:
    return kernels.linear(matrix, bias), kernels.linear(matrix.dense(), bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("depth", "columns"), SIZES)
@pytest.mark.parametrize("encoding", DECODERS)
@pytest.mark.parametrize("name", NATIVE)
def test_products_have_the_bits_of_those_with_numbers(
    name: str, encoding: str, depth: int, columns: int, dtype: torch.dtype
) -> None:
    kernels, matrix = make(name), blocks(columns, depth, encoding, dtype)
    kept, dense = linears(kernels, matrix, numbers(columns, dtype=dtype))
    gates = [kernels.gated(of, of) for of in (matrix, matrix.dense())]
    for rows in ROWS:
        x = numbers(rows, depth, dtype=dtype)
        if not multiplies_blocks(name, encoding, dtype):
            assert torch.equal(kept(x, rows), dense(x))
        assert torch.equal(kept(x), dense(x))
        assert torch.equal(kept.floats(x), dense.floats(x))
        hidden = numbers(rows, columns)
        sums = [hidden.clone(), hidden.clone()]
        kept.add_to(sums[0], x)
        dense.add_to(sums[1], x)
        assert torch.equal(*sums)
        assert torch.equal(*(gated(x) for gated in gates))


def exact(matrix: BlockMatrix) -> Tensor:
    """What the blocks stand for, not rounded to the model's dtype."""
    return replace(matrix, dtype=torch.float32).dense().double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("encoding", DECODERS)
@pytest.mark.parametrize("name", ["torch", *NATIVE])
def test_products_are_right(name: str, encoding: str, dtype: torch.dtype) -> None:
    kernels, matrix = make(name), blocks(96, 64, encoding, dtype)
    bias, gate = numbers(96, dtype=dtype), blocks(96, 64, encoding, dtype, scale_bits=0x2FFF)
    linear, gated = kernels.linear(matrix, bias), kernels.gated(gate, matrix)
    _, head = kernels.tied(matrix)
    slack = 1e-5 if dtype == torch.float32 else 1e-2
    for rows in (1, 40):
        x = numbers(rows, 64, dtype=dtype)
        up, left = (x.double() @ exact(of).T for of in (matrix, gate))
        most_up, most_left = (x.double().abs() @ exact(of).abs().T for of in (matrix, gate))
        assert ((head.floats(x) - up).abs() <= slack * most_up).all()
        assert ((linear(x) - up - bias).abs() <= slack * (most_up + bias.abs())).all()
        wanted = left * left.sigmoid() * up
        assert ((gated(x) - wanted).abs() <= 3 * slack * (most_left + 1) * most_up).all()


@pytest.mark.parametrize("encoding", DECODERS)
def test_few_rows_by_tiles_round_no_weight(encoding: str) -> None:
    """The error is that of float32 sums: a thousandth of what bfloat16 weights would bring."""
    matrix = blocks(50, 576, encoding, BF16)
    kernels = make("native by tiles")
    linear, rounded = kernels.linear(matrix), kernels.linear(matrix.dense())
    for rows in (1, 3, 16, 47, 64, 70):
        x = numbers(rows, 576, dtype=BF16)
        wanted, most = x.double() @ exact(matrix).T, x.double().abs() @ exact(matrix).abs().T
        found, coarse = (of.floats(x, rows).double() - wanted for of in (linear, rounded))
        if multiplies_blocks("native by tiles", encoding, BF16):
            assert (found.abs() <= 1e-5 * most).all()
            assert found.abs().max() < 0.1 * coarse.abs().max()
        else:
            assert torch.equal(found, coarse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NATIVE)
def test_a_row_has_the_same_bits_in_any_batch(name: str, dtype: torch.dtype) -> None:
    """Single tokens whatever the others are, and those of prompts too."""
    kernels, matrix = make(name), blocks(320, 576, "Q4_1", dtype)
    linear, gated = kernels.linear(matrix), kernels.gated(matrix, matrix)
    x = numbers(300, 576, dtype=dtype)
    singles = linear.floats(x, 300), gated(x, 300)
    prompts = linear.floats(x), gated(x)
    for rows in (slice(20, 21), slice(23, 27), slice(21, 36), slice(20, 37), slice(0, 64)):
        part, count = x[rows].contiguous(), rows.stop - rows.start
        for first in (0, 1, count // 2, count):
            for of, few, many in zip((linear.floats, gated), singles, prompts, strict=True):
                found = of(part, first)
                assert torch.equal(found[:first], few[rows][:first])
                assert torch.equal(found[first:], many[rows][first:])
    if not multiplies_blocks(name, "Q4_1", dtype):
        assert torch.equal(singles[0], prompts[0])


@pytest.mark.parametrize("name", ["torch", "native"])
def test_an_embedding_and_its_head_share_what_they_hold(name: str) -> None:
    matrix = blocks(70, 64, "Q8_0", torch.bfloat16)
    embedding, head = make(name).tied(matrix)
    ids = torch.tensor([69, 0, 0, 33])
    rows = embedding(ids)
    assert torch.equal(rows, matrix.dense()[ids].float())
    wanted = rows.double() @ matrix.dense().double().T
    close(head.floats(rows.bfloat16()), wanted, BF16)
