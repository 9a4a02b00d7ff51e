"""Real traffic: what the choice must reach against the simple rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.router.replay import Call, Replay, Report, mooncake

DATA = Path(__file__).parents[4] / "shared" / "data"
CONVERSATION = DATA / "mooncake_conversation_2000.jsonl"
REPLICAS = 4
BLOCKS = 2_048


def replay(policy: str, calls: list[Call], tokens_per_s: float) -> Report:
    return Replay(policy, REPLICAS, BLOCKS, tokens_per_s).run(calls)


@pytest.fixture(scope="module")
def conversation() -> list[Call]:
    if not CONVERSATION.exists():
        pytest.skip(f"no traces: {CONVERSATION} is missing")
    return mooncake(CONVERSATION, 2_000)


@pytest.mark.traces
@pytest.mark.parametrize("tokens_per_s", [14_000.0, 8_700.0], ids=["util_0.75", "util_1.2"])
def test_R2_conversation_trace(conversation: list[Call], tokens_per_s: float) -> None:
    ours = replay("warmroute", conversation, tokens_per_s)
    least_load = replay("least_load", conversation, tokens_per_s)
    round_robin = replay("round_robin", conversation, tokens_per_s)
    assert ours.imbalance(REPLICAS) < 1.3
    assert ours.p95_ttft_s() <= least_load.p95_ttft_s()
    assert ours.mean_ttft_s() <= 0.8 * least_load.mean_ttft_s()
    assert ours.hit_ratio() >= 1.5 * round_robin.hit_ratio()


@pytest.mark.traces
def test_no_peer_rule_beats_the_mean_ttft_by_much(conversation: list[Call]) -> None:
    ours = replay("warmroute", conversation, 14_000.0)
    for peer in ("bounded_hash", "longest_prefix", "block_cost", "weighted", "preble"):
        assert ours.mean_ttft_s() <= 1.1 * replay(peer, conversation, 14_000.0).mean_ttft_s()
