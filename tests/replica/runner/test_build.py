"""Settings: what is chosen, what is refused, what is fallen back to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.load import ConfigError
from configs.model.card import ModelCard, load_card
from configs.native import cpu_flags
from configs.schema import ReplicaConfig
from replica.native import library
from replica.runner.build import build_runner, kv_layout
from replica.sched.plan import ExecutionPlan, PlanId


@pytest.fixture(scope="module")
def card(tiny_model: Path) -> ModelCard:
    return load_card(tiny_model)


def settings(**changes: Any) -> ReplicaConfig:
    return ReplicaConfig(**{"id": "r0", "kv_blocks": 8, **changes})


def test_the_layout_says_what_a_block_holds(card: ModelCard) -> None:
    layout = kv_layout(card, settings(dtype="bfloat16", block_tokens=32))
    assert (layout.dtype, layout.block_tokens) == ("bfloat16", 32)
    assert (layout.layers, layout.kv_heads, layout.head_dim) == (2, 2, 16)
    assert "10000" in layout.rope


def test_auto_dtype_follows_the_cpu(card: ModelCard) -> None:
    fast = bool({"amx_bf16", "avx512_bf16"} & cpu_flags())
    assert kv_layout(card, settings()).dtype == ("bfloat16" if fast else "float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float8"}, "float8"),
        ({"kernel": "magic"}, "magic"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": "abacus"}, "abacus"),
    ],
)
def test_what_cannot_be_used_is_named(
    card: ModelCard, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_runner(card, settings(**changes))


def test_4_bit_weights_are_refused_where_there_are_none(card: ModelCard) -> None:
    with pytest.raises(ConfigError, match=r"Q4_1 weights; .*tiny\.gguf holds F16, F32"):
        build_runner(card, settings(weights="q4"))


def test_the_pool_is_as_large_as_asked(card: ModelCard) -> None:
    runner = build_runner(card, settings(kv_blocks=24, block_tokens=8))
    assert (runner.total_blocks, runner.block_tokens) == (24, 8)


def test_without_a_compiler_plain_torch_takes_over_and_says_so(
    card: ModelCard,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("WARMROUTE_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    library.load_library.cache_clear()
    try:
        runner = build_runner(card, settings())
    finally:
        library.load_library.cache_clear()
    assert "no C++ compiler" in caplog.text
    assert runner.execute(ExecutionPlan(PlanId(1), ())).plan_id == 1
