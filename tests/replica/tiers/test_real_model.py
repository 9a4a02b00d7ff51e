"""Cold, warm, and restored from the host or from afar: the same greedy tokens in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from configs.model.card import load_card
from configs.schema import KvConfig, ReplicaConfig
from events.load import PrefillFit
from events.request import SamplingParams
from kvstore.layout import Layout
from replica.runner.build import build_runner, kv_layout
from tests.fakes.memory_tier import MemoryTier
from tests.fakes.slow_tier import SlowTier
from tests.replica.engine.rig import WAIT_S
from tests.replica.sched.rig import sampling, tokens_of
from tests.replica.tiers.rig import TieredRig, space_of


@contextmanager
def restoring(path: Path, near: bool, **settings: object) -> Iterator[TieredRig]:
    """An engine over the model, with one tier: the host's, or one for all hosts."""
    config = ReplicaConfig(**{"id": "r", "dtype": "float32", "threads": 1, **settings})
    card = load_card(path)
    layout, runner = kv_layout(card, config), build_runner(card, config)
    mover = runner.mover(Layout.of(layout))
    tiers = (MemoryTier(1 << 30), None) if near else (None, SlowTier("far", trusted=False))
    kv = KvConfig(check_one_in=2, load_deadline_ms=20_000.0, lookup_ms=5_000.0)
    rig = TieredRig(runner, mover, space_of(layout), *tiers, kv, max_step_tokens=64)
    rig.engine.start()
    # A model as small as the tests' computes faster than any load: here it pretends to be slow.
    rig.tiers.loader.prefill = lambda: PrefillFit(a=0.0, b=10.0, c=0.0, confidence=1.0)
    try:
        yield rig
    finally:
        rig.engine.close(WAIT_S)


def assert_restored(rig: TieredRig, prompts: list[tuple[int, ...]], params: SamplingParams) -> None:
    """Runs each prompt cold, warm, restored, and restored in part."""
    size = rig.block_tokens
    cold = [rig.sink.tokens(rig.run(prompt, params)) for prompt in prompts]
    warm = [rig.sink.tokens(rig.run(prompt, params)) for prompt in prompts]
    assert warm == cold
    for keep in (0, 2 * size + 1):
        rig.forget()
        for prompt, wanted in zip(prompts, cold, strict=True):
            if keep:
                rig.run(prompt[:keep], params)
            child = rig.run(prompt, params)
            assert rig.sink.tokens(child) == wanted
            full = (len(prompt) - 1) // size * size
            assert rig.sink.end_of(child).cached_tokens in (full, full - size)
    assert rig.tiers.loader.loaded_blocks > 0
    assert rig.tiers.spot.checked > 0
    assert rig.tiers.spot.mismatches == 0
    assert all(not level.counts.refused for level in rig.tiers.cascade.levels)


@pytest.mark.parametrize("near", [True, False], ids=["host", "remote"])
def test_C11_restored_blocks_give_the_same_tokens(tiny_model: Path, near: bool) -> None:
    prompts = [
        tuple(token % 250 for token in tokens_of(seed, length))
        for seed, length in ((1, 33), (2, 70), (3, 41))
    ]
    with restoring(tiny_model, near, block_tokens=8, kv_blocks=64, kernel="torch") as rig:
        assert_restored(rig, prompts, sampling(12, ignore_eos=True))


@pytest.mark.slow
@pytest.mark.parametrize("near", [True, False], ids=["host", "remote"])
def test_C11_restored_blocks_of_a_real_model(real_model: Path, near: bool) -> None:
    prompts = [tokens_of(1, 130)]
    with restoring(real_model, near, kv_blocks=128, threads=2) as rig:
        assert_restored(rig, prompts, sampling(10, ignore_eos=True))
