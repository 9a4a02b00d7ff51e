"""How busy a replica is, from what its reports count."""

from __future__ import annotations

import pytest

from router.fleet.usage import MEMORY_S, Usage
from tests.router.kit import load


def watched(usage: Usage, seconds: int, tokens_per_s: int, start: int = 0) -> int:
    """So many reports, one a second, at 1 ms a token; the count of tokens at the end."""
    for second in range(1, seconds + 1):
        total = start + second * tokens_per_s
        usage.learn(load(prompt_tokens_total=2 * total, cached_tokens_total=total), 1.0, 1.0)
    return start + seconds * tokens_per_s


def test_it_comes_to_the_share_of_the_time_that_prefills_take_and_forgets_it() -> None:
    usage = Usage()
    tokens = watched(usage, 300, 500)
    assert usage.share == pytest.approx(0.5, rel=0.02)
    watched(usage, int(3 * MEMORY_S), 0, tokens)
    assert usage.share < 0.05


def test_who_was_just_met_or_begins_again_is_not_busy() -> None:
    usage = Usage()
    usage.learn(load(prompt_tokens_total=10**9), 1.0, 0.1)
    assert usage.share == 0
    usage.learn(load(prompt_tokens_total=0), 1.0, 0.1)
    assert usage.share == 0
    watched(usage, 1_000, 10**6)
    assert usage.share == 1
