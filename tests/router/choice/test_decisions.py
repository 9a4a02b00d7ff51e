"""The log of decisions: what it keeps, and what it forgets with it."""

from __future__ import annotations

from events.decision import RouteDecision
from router.choice.decisions import DecisionLog


def decision(number: int, request_id: str) -> RouteDecision:
    return RouteDecision(
        decision_id=f"d{number}",
        request_id=request_id,
        tenant="t",
        policy="plain",
        replica="r0",
        dispatch_seq=number,
        attempt=1,
        prompt_tokens=1,
        predicted_cached_tokens=0,
        predicted_ttft_ms=0.0,
        reason="test",
        candidates=(),
        decided_us=0.0,
        wall_time_ms=0,
    )


def test_attempts_of_a_request_are_forgotten_with_their_records() -> None:
    log = DecisionLog(3)
    for number, request_id in enumerate(("a", "b", "a", "a")):
        log.add(decision(number, request_id))
    assert log.attempts("a") == ["d2", "d3"]
    assert log.attempts("b") == ["d1"]
    for number in range(4, 100):
        log.add(decision(number, f"c{number}"))
    assert log.attempts("a") == log.attempts("b") == []
    assert len(log) == 3
