"""What a revision's latest attempts prove: by their ends, and by how long they waited."""

from __future__ import annotations

from router.choice.route import Outcome
from router.replication.compute import Unheard
from router.revisions.watch import MIN_ATTEMPTS, WINDOW_S, Watch
from tests.router.choice.test_decisions import decision
from tests.router.kit import Clock


def test_who_leaves_early_says_nothing_and_who_waited_too_long_does() -> None:
    clock = Clock()
    watch = Watch(Unheard(), clock)

    def end(status: str, e2e_ms: float, ttft_ms: float | None = None) -> None:
        watch.ended(decision(1, "q"), Outcome(status, False, e2e_ms=e2e_ms, ttft_ms=ttft_ms))

    for _ in range(2 * MIN_ATTEMPTS):
        end("client_gone", 50.0)
    assert watch.breach(100.0, 0.0) == ""
    assert (watch.attempts, watch.error_ratio, watch.ttft_p90_ms) == (0, 0.0, 0.0)
    for _ in range(2 * MIN_ATTEMPTS):
        end("ok", 900.0, 50.0)
    for _ in range(3):
        end("client_gone", 5_000.0)
    assert watch.breach(100.0, 0.0) == ""
    for _ in range(3):
        end("client_gone", 5_000.0)
    assert watch.breach(100.0, 0.0) == "TTFT p90 of 5000 ms"
    clock.pass_s(WINDOW_S + 1)
    assert watch.breach(100.0, 0.0) == ""
