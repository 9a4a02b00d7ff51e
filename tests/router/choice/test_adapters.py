"""Requests that need an adapter: only where it is served, and sooner where it is in memory."""

from __future__ import annotations

import pytest

from events.load import AdapterNote
from router.choice.route import NoReplica
from tests.router.kit import World, hello, load, prompt

P = prompt((1, 4))
X = ("x", "one")


def world_of(**notes: AdapterNote) -> World:
    world = World(3)
    for replica, note in notes.items():
        world.fleet.on_hello(replica, 1, hello(adapters=(note,)))
    return world


def note(
    digest: str = "one", resident: bool = True, load_ms: float = 40.0, failing: bool = False
) -> AdapterNote:
    return AdapterNote("x", digest, resident, load_ms, failing)


def test_only_those_that_serve_it_are_asked() -> None:
    world = world_of(r0=note("two"), r2=note(resident=False))
    for _ in range(5):
        decision = world.decide(P, adapter=X)
        assert decision.replica == "r2"
    why = {terms.replica: terms.filtered for terms in decision.candidates}
    assert why == {"r0": "adapter", "r1": "adapter", "r2": None}
    assert world.decide(P).fit_replicas == 3


def test_where_nobody_serves_it_the_answer_says_so() -> None:
    answer = world_of(r1=note("two")).brain.decide(World().query(P, adapter=X))
    assert isinstance(answer, NoReplica)
    assert "(adapter)" in answer.reason


def test_a_load_counts_in_ms_until_it_is_done() -> None:
    world = world_of(r0=note(resident=False, load_ms=7.0), r1=note(resident=False, load_ms=90.0))
    decision = world.decide(P, adapter=X)
    terms = {each.replica: each for each in decision.candidates}
    assert decision.replica == "r0"
    assert (terms["r0"].transfer_ms, terms["r1"].transfer_ms) == (7.0, 90.0)
    assert terms["r0"].score - terms["r1"].score == pytest.approx(83.0)
    assert decision.predicted_ttft_ms == pytest.approx(7.0 + terms["r0"].prefill_ms)
    world.end(decision, "ok")
    world.fleet.on_hello("r1", 1, hello(adapters=(note(),)))
    decision = world.decide(prompt((2, 4)), adapter=X)
    assert decision.replica == "r1"
    assert decision.candidates[0].transfer_ms == 0.0


def test_a_short_load_is_worth_a_warm_prefix_and_a_long_one_is_not() -> None:
    long = prompt((1, 40))
    world = world_of(r0=note(resident=False, load_ms=50.0), r1=note())
    world.hold("r0", long)
    assert world.decide(long, adapter=X).replica == "r0"
    world.fleet.on_hello("r0", 1, hello(adapters=(note(resident=False, load_ms=5e3),)))
    assert world.decide(long, adapter=X).replica == "r1"


def test_where_its_load_fails_nobody_is_sent_for_it_until_it_is_said_to_be_over() -> None:
    failing = note(resident=False, load_ms=1.0, failing=True)
    world = world_of(r0=failing, r2=note(resident=False))
    for _ in range(5):
        decision = world.decide(P, adapter=X)
        assert decision.replica == "r2"
    why = {terms.replica: terms.filtered for terms in decision.candidates}
    assert why["r0"] == "adapter_failing"
    assert [(each.name, each.replica) for each in world.fleet.alarms] == [("adapter_failing", "r0")]
    assert world.decide(P).fit_replicas == 3
    world.fleet.on_hello("r2", 1, hello(adapters=(failing,)))
    answer = world.brain.decide(world.query(P, adapter=X))
    assert isinstance(answer, NoReplica)
    assert "adapter_failing" in answer.reason
    world.fleet.on_hello("r0", 1, hello(adapters=(note(resident=False),)))
    assert world.decide(P, adapter=X).replica == "r0"


def test_who_is_asked_for_by_name_is_not_asked_for_what_is_not_served_there() -> None:
    world = world_of(r0=note(resident=False, failing=True), r2=note())
    for replica, why in (("r0", "adapter_failing"), ("r1", "adapter")):
        answer = world.brain.decide(world.query(P, adapter=X, pin=replica))
        assert isinstance(answer, NoReplica)
        assert f"({why})" in answer.reason
    assert world.decide(P, adapter=X, pin="r2").replica == "r2"


def test_another_content_under_its_name_leaves_the_model_and_other_adapters() -> None:
    """A replica that comes back with an adapter that was trained further."""
    other = AdapterNote("y", "two", True, 1.0)
    world = world_of(r0=note(), r1=note(), r2=note())
    world.fleet.on_hello("r0", 2, hello(adapters=(note("retrained"), other)))
    world.fleet.link_state("r0", 2, True)
    world.fleet.on_load("r0", 2, load())
    assert {world.decide(P, adapter=X).replica for _ in range(8)} == {"r1", "r2"}
    assert world.decide(P, adapter=("y", "two")).replica == "r0"
    assert world.decide(P).fit_replicas == 3
