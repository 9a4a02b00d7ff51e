"""The heat of prefixes: the native window against its twin, over whatever requests come."""

from __future__ import annotations

import random
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.policies.heat import PlainHeat, native_heat
from tests.router.kit import prompt

HEADS = [(0, 3), (1, 3)]
CHAINS = [prompt(*parts) for parts in ([(9, 0)], [HEADS[0]], [HEADS[1]])] + [
    prompt(head, (seed, blocks)) for head in HEADS for seed in (5, 6) for blocks in (1, 9, 80)
]


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), window=st.sampled_from([9, 40, 256]))
def test_the_native_heat_is_its_twin(seed: int, window: int) -> None:
    rng = random.Random(seed)
    heats = [native_heat(window), PlainHeat(window)]
    for _ in range(rng.randrange(300)):
        chain = rng.choice(CHAINS[: rng.choice([2, 5, len(CHAINS)])])
        shared = rng.randrange(len(chain) + 1)
        for heat in heats:
            heat.note(chain, shared)
        asked = rng.choice(CHAINS)
        depth = rng.randrange(len(asked) + 3)
        native, twin = (heat.hot(asked, depth) for heat in heats)
        assert native == twin
        depth = min(depth, len(asked))
        native, twin = (heat.holders_deserved(asked, depth, 12) for heat in heats)
        assert native == twin


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_the_kernel_reads_nothing_beyond_a_chains_ends() -> None:
    heat, chain = native_heat(9), prompt((1, 4))
    for _ in range(9):
        heat.note(chain, 4)
    count = heat._count
    assert [count(chain.data, 4, blocks) for blocks in (-1, 0, 1, 4, 5)] == [0, 0, 0, 9, 0]
    assert count(chain.data, 3, 4) == 0, "the chain has three blocks, whatever lies behind them"
