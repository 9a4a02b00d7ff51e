"""What a scrape shows of a scheduler's answers: each reason by its word."""

from __future__ import annotations

from replica.engine.report import report
from replica.engine.seen import SeenDispatches
from replica.front.metrics import FrontGauges, Metrics
from tests.fakes.adapter_loader import FakeAdapters
from tests.replica.sched.rig import Bench, sampling, tokens_of


def scrape(bench: Bench) -> dict[str, float]:
    metrics = Metrics()
    load = report(bench.scheduler, SeenDispatches(), 0.0, True, 0, 0)
    metrics.watch(lambda: load, lambda: FrontGauges(0, 0, 0, 0, 0, 0, 0.0))
    lines = metrics.exposition().decode().splitlines()
    rows = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name.removeprefix("warmroute_replica_"): float(value) for name, value in rows}


def test_why_a_request_waits_or_is_refused_is_shown_by_reason() -> None:
    bench = Bench(24, 4, max_running=2, context_tokens=80, adapters=FakeAdapters("x"))
    bench.add(tokens_of(1, 100))
    bench.add(tokens_of(2, 5), adapter="x")
    for seed, (prompt, answer) in enumerate([(40, 30), (40, 30), (5, 9), (5, 9)], 3):
        bench.add(tokens_of(seed, prompt), sampling(answer, ignore_eos=True))
    for _ in range(3):
        bench.step()
    bench.run()
    shown = scrape(bench)
    assert shown['admission_never_total{reason="context_length_exceeded"}'] == 1
    for reason in ("adapter", "headroom", "seats"):
        assert shown[f'admission_later_total{{reason="{reason}"}}'] >= 1, shown
    assert shown["adapter_loads_total"] == 1
