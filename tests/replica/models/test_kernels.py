"""The native kernels against plain torch in float64, for sizes that fill no vector."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from configs.native import CompileError
from replica.models.kernels import Kernels
from replica.models.native_kernels import NativeKernels
from replica.models.torch_kernels import TorchKernels
from replica.native.library import load_library

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(64, 96), (128, 48), (62, 50), (576, 33), (34, 1)]
ROWS = [1, 7, 8, 9, 40, 300]


def make(name: str) -> Kernels:
    if name == "torch":
        return TorchKernels(EPS)
    try:
        library = load_library()
    except CompileError as error:
        pytest.skip(f"no native kernels here: {error}")
    if name == "native by tiles" and not library.wr_tiles():
        pytest.skip("this CPU, or its kernel, has no AMX for us")
    return NativeKernels(library, EPS, tiles=name == "native by tiles")


def numbers(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    slack = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.double(), wanted, atol=slack, rtol=slack)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("depth", "columns"), SIZES)
@pytest.mark.parametrize("name", ["torch", "native", "native by tiles"])
def test_products(name: str, depth: int, columns: int, dtype: torch.dtype) -> None:
    kernels = make(name)
    weight, bias = numbers(columns, depth, dtype=dtype), numbers(columns, dtype=dtype)
    plain, biased = kernels.linear(weight), kernels.linear(weight, bias)
    for rows in ROWS:
        x = numbers(rows, depth, dtype=dtype)
        wanted = x.double() @ weight.double().T
        close(biased(x), wanted + bias.double(), dtype)
        assert plain(x).dtype == dtype
        floats = plain.floats(x)
        assert floats.dtype == torch.float32
        close(floats, wanted, dtype)
        hidden = numbers(rows, columns)
        before = hidden.clone()
        plain.add_to(hidden, x)
        close(hidden, before.double() + wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("depth", "columns"), SIZES)
@pytest.mark.parametrize("name", ["torch", "native", "native by tiles"])
def test_gated_products(name: str, depth: int, columns: int, dtype: torch.dtype) -> None:
    gate, up = (numbers(columns, depth, dtype=dtype), numbers(columns, depth, dtype=dtype) * 2)
    kernels = make(name)
    gated, beside = kernels.gated(gate, up), kernels.beside(gate, up, depth)
    for rows in ROWS:
        x = numbers(rows, depth, dtype=dtype)
        halves = x.double() @ gate.double().T, x.double() @ up.double().T
        found = gated.halves(x)
        close(found, x.double() @ beside.double().T, dtype)
        if name == "torch" or depth % 2:
            torch.testing.assert_close(gated.gate(found, dtype), gated(x), atol=0.1, rtol=0.02)
        else:
            assert torch.equal(gated.gate(found, dtype), gated(x))
        wanted = silu(halves[0]) * halves[1]
        found = gated(x)
        assert found.dtype == dtype
        slack = 1e-4 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(found.double(), wanted, atol=slack * 10, rtol=slack)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 576, 36])
@pytest.mark.parametrize("name", ["torch", "native"])
def test_norms(name: str, size: int, dtype: torch.dtype) -> None:
    kernels, hidden, weight = make(name), numbers(5, size) * 3, numbers(size)
    x = hidden.double()
    wanted = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    found = kernels.norm(hidden, weight, dtype)
    assert found.dtype == dtype
    close(found, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["native", "native by tiles"])
def test_a_row_has_the_same_bits_in_any_batch(name: str, dtype: torch.dtype) -> None:
    kernels = make(name)
    linear = kernels.linear(numbers(960, 576, dtype=dtype))
    x = numbers(150, 576, dtype=dtype)
    together = linear.floats(x)
    for rows in (slice(0, 1), slice(3, 7), slice(20, 37), slice(30, 80), slice(140, 150)):
        assert torch.equal(linear.floats(x[rows].contiguous()), together[rows])


@pytest.mark.parametrize("name", ["torch", "native", "native by tiles"])
def test_what_is_not_finite_stays_in_its_row(name: str) -> None:
    kernels = make(name)
    x = numbers(9, 64, dtype=torch.bfloat16)
    x[4, 10] = float("nan")
    weight = numbers(64, 64, dtype=torch.bfloat16)
    for found in (kernels.linear(weight)(x), kernels.gated(weight, weight)(x)):
        assert found.isfinite().all(-1).tolist() == [row != 4 for row in range(9)]
        assert found[4].isnan().all()


@pytest.mark.parametrize("name", ["torch", "native"])
def test_a_gate_far_below_zero_is_shut(name: str) -> None:
    x = torch.ones(1, 2)
    gate = torch.tensor([[-500.0, -500.0], [500.0, 500.0]])
    found = make(name).gated(gate, torch.ones(2, 2))(x)
    torch.testing.assert_close(found, torch.tensor([[0.0, 2000.0]]))
