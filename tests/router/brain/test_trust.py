"""Trust falls with predicted hits that don't happen, and says when nothing ever matches."""

from __future__ import annotations

from router.trust import Prediction, Trust


def feed(trust: Trust, predicted: Prediction, cached_tokens: int, times: int) -> None:
    for turn in range(times):
        trust.observe(predicted, cached_tokens, 100.0, 100.0 * trust.samples + turn)


def test_hits_that_happen_keep_trust() -> None:
    trust = Trust()
    feed(trust, Prediction(512, 512, 100.0), 512, 20)
    assert trust.value == 1.0
    assert not trust.false_hits


def test_hits_that_do_not_happen_lose_it_and_later_ones_bring_it_back() -> None:
    trust = Trust()
    feed(trust, Prediction(512, 512, 100.0), 0, 20)
    assert trust.value < 0.05
    assert trust.false_hits
    feed(trust, Prediction(512, 512, 100.0), 512, 20)
    assert trust.value > 0.9
    assert not trust.false_hits


def test_a_cold_prompt_says_nothing_about_trust() -> None:
    trust = Trust()
    feed(trust, Prediction(0, 0, 100.0), 0, 20)
    assert trust.value == 1.0
    assert not trust.nothing_matches


def test_R8_a_cache_that_hits_where_the_digest_never_says_so_is_noticed() -> None:
    trust = Trust()
    feed(trust, Prediction(0, 0, 100.0), 512, 4)
    assert trust.nothing_matches
    trust.observe(Prediction(512, 512, 100.0), 512, 100.0, 1_000.0)
    assert not trust.nothing_matches


def test_R8_siblings_of_one_burst_count_once() -> None:
    trust = Trust()
    for _ in range(20):
        trust.observe(Prediction(0, 512, 100.0), 512, 100.0, 5.0)
    assert not trust.nothing_matches


def test_a_replica_without_a_digest_is_not_said_to_mismatch() -> None:
    trust = Trust()
    feed(trust, Prediction(None, 512, 100.0), 512, 20)
    assert not trust.nothing_matches
