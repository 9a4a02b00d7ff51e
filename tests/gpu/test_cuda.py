"""The same conformance and recordings on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from configs.model.card import load_card
from configs.schema import ReplicaConfig
from replica.attention.base import HeadShape
from replica.attention.torch_paged import TorchPagedAttention
from replica.runner.build import build_runner, kv_layout
from tests.replica.attention.cases import ROWS, SHAPES, build_case, check
from tests.replica.runner.golden import check as check_golden
from tests.replica.runner.golden import recordings, run_side_by_side

pytestmark = pytest.mark.gpu

FEW = [0, 6, 18, 30, 42, 48, 50, 53, 61]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _exact_float32() -> None:
    """The recordings were made without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.heads}/{shape.kv_heads}")
def test_attention_conforms(shape: HeadShape, rows: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    check(TorchPagedAttention(shape), build_case(shape, ROWS[rows], dtype, device), device)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_golden(real_model: Path, dtype: str) -> None:
    config = ReplicaConfig(id="r0", device="cuda", dtype=dtype, kv_blocks=1024)
    runner = build_runner(load_card(real_model), config)
    chosen = recordings(FEW)
    check_golden(run_side_by_side(runner, chosen, chunk=100), chosen, dtype)


def test_auto_is_bfloat16(tiny_model: Path) -> None:
    config = ReplicaConfig(id="r0", device="cuda")
    assert kv_layout(load_card(tiny_model), config).dtype == "bfloat16"
