"""One number drives the scheduler: debt = known + placeholders - computed."""

from __future__ import annotations

import pytest

from kvstore.identity import KeyChain
from replica.engine.messages import EngineRequest
from replica.sched.plan import ChildId
from replica.sched.request import Request
from tests.replica.sched.rig import Bench, sampling, tokens_of


def request_of(prompt: int) -> Request:
    spec = EngineRequest(
        child=ChildId(1),
        prompt=tokens_of(1, prompt),
        chain=KeyChain(b"", b""),
        params=sampling(),
        seed=0,
        eos_ids=frozenset(),
        tenant="t",
        arrival_s=0.0,
    )
    return Request(spec, (spec.arrival_s, spec.child))


@pytest.mark.parametrize(
    ("case", "output", "placeholders", "computed", "debt"),
    [
        ("fresh", 0, 0, 0, 10),
        ("after a chunk", 0, 0, 6, 4),
        ("a chunk in flight, then another", 0, 0, 8, 2),
        ("all but the last token from the cache", 0, 0, 9, 1),
        ("the last chunk in flight", 0, 1, 10, 1),
        ("decoding", 3, 0, 12, 1),
        ("a decode in flight", 3, 1, 13, 1),
        ("a decode in flight and the next one planned", 3, 2, 14, 1),
        ("a middle chunk in flight and the last one planned", 0, 1, 10, 1),
        ("resumed without a hit", 3, 0, 0, 13),
        ("resumed with a hit", 3, 0, 8, 5),
    ],
)
def test_debt(case: str, output: int, placeholders: int, computed: int, debt: int) -> None:
    request = request_of(10)
    request.tokens.extend(range(output))
    request.placeholders, request.computed = placeholders, computed
    assert request.debt == debt, case


def test_debt_in_a_real_run() -> None:
    bench = Bench(max_step_tokens=6)
    child = bench.add(tokens_of(1, 10))
    request = bench.scheduler.table.get(child)
    assert request is not None
    seen = [request.debt]
    for _ in range(3):
        plan = bench.plan()
        assert plan is not None
        seen.append(request.debt)
        bench.finish_step(plan)
        seen.append(request.debt)
    assert seen == [10, 4, 4, 1, 1, 1, 1]


def test_the_table_snapshot_is_reused_until_it_grows() -> None:
    bench = Bench(block_tokens=4)
    bench.add(tokens_of(1, 5), sampling(8))
    plans = [bench.step() for _ in range(5)]
    tables = [plan.rows[0].block_ids for plan in plans if plan is not None]
    assert tables[1] is tables[0]
    assert tables[3] is tables[2] is tables[1]
    assert len(tables[4]) == 3
