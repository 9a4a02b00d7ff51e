"""Tenants with long prompts of their own and a head that all share, caches that can't hold all."""

from __future__ import annotations

import random

import mmh3
import numpy as np
import pytest

from tests.router.kit import hello
from tests.router.replay import Call, Replay, Report

TENANTS, TURNS = 8, 6
PUBLIC, SYSTEM, QUESTION, ANSWER = 240, 1_000, 40, 24
TOKENS_PER_S = 1_000.0
CACHE_SHARE = 0.6


def load(seed: int, utilisation: float) -> list[Call]:
    rng = random.Random(seed)
    deck = [tenant for tenant in range(TENANTS) for _ in range(TURNS)]
    rng.shuffle(deck)
    said, now_s, calls = [0] * TENANTS, 0.0, []
    cold_s = (PUBLIC + SYSTEM + QUESTION) / TOKENS_PER_S
    for tenant in deck:
        tokens = PUBLIC + SYSTEM + QUESTION * (said[tenant] + 1) + ANSWER * said[tenant]
        names = [
            f"public {block}" if (block + 1) * 16 <= PUBLIC else f"{tenant} {block}"
            for block in range(tokens // 16)
        ]
        keys = tuple(mmh3.hash_bytes(name) for name in names)
        calls.append(Call(now_s, tokens, ANSWER, keys))
        said[tenant] += 1
        now_s += rng.expovariate(2 * utilisation / cold_s)
    return calls


def ceiling(calls: list[Call]) -> float:
    """The hit ratio of one cache that holds everything."""
    seen: set[bytes] = set()
    hit = 0
    for call in calls:
        hit += 16 * sum(key in seen for key in call.keys)
        seen.update(call.keys)
    return hit / sum(call.prompt_tokens for call in calls)


def replay(policy: str, calls: list[Call]) -> Report:
    blocks = len({key for call in calls for key in call.keys})
    return Replay(policy, 2, int(CACHE_SHARE * blocks), TOKENS_PER_S, hello()).run(calls)


@pytest.mark.parametrize("utilisation", [0.5, 0.9])
@pytest.mark.parametrize("seed", range(1, 5))
def test_each_tenant_finds_a_home_and_keeps_it(seed: int, utilisation: float) -> None:
    calls = load(seed, utilisation)
    ours, round_robin = replay("warmroute", calls), replay("round_robin", calls)
    assert ours.hit_ratio() >= 0.97 * ceiling(calls)
    assert np.median(ours.ttft_s) <= np.median(round_robin.ttft_s) / 2.5
    assert ours.imbalance(2) <= 1.3
