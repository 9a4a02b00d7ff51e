"""What a replica is there for decides what it may be asked; never whether anybody answers."""

from __future__ import annotations

from events.decision import RouteDecision
from router.choice.gaps import KEPT_S
from router.choice.route import NoReplica
from tests.router.kit import BLOCK_TOKENS, World, hello, load, prompt

LONG = prompt((1, 40))
SHORT = prompt((2, 4))
WAITED_FOR = load(queued_prefill_tokens=900, waiting=1, running=8)


def world_of(itl_target_ms: float = 0.0, **roles: str) -> World:
    world = World()
    for name, role in roles.items():
        world.fleet.on_hello(name, 1, hello(role=role, itl_target_ms=itl_target_ms))
        world.fleet.link_state(name, 1, True)
        world.fleet.on_load(name, 1, load())
        world.hold(name)
    return world


def told_idle(world: World, *names: str) -> None:
    """For as long as that is believed."""
    world.clock.pass_s(20.0)
    for name in names:
        world.fleet.on_load(name, 1, load())
        world.hold(name)


def filtered(decision: RouteDecision) -> dict[str, str | None]:
    return {terms.replica: terms.filtered for terms in decision.candidates}


def test_who_computes_for_others_answers_nobody() -> None:
    for promised_ms in (None, 100.0, 1_000.0):
        world = world_of(p0="prefill", d0="decode")
        decision = world.decide(SHORT, itl_deadline_ms=promised_ms)
        assert filtered(decision) == {"d0": None, "p0": "role"}
        assert decision.replica == "d0"


def test_where_nothing_was_promised_a_role_only_breaks_ties() -> None:
    world = world_of(p0="prefill", d0="decode", d1="decode")
    world.fleet.on_load("d0", 1, WAITED_FOR)
    assert filtered(world.decide(SHORT))["p0"] == "role"  # d1 is idle
    world.fleet.on_load("d1", 1, WAITED_FOR)
    decision = world.decide(SHORT)
    assert filtered(decision) == {"p0": None, "d0": None, "d1": None}
    assert decision.replica == "p0"


def test_who_computes_for_others_answers_too_where_no_prompt_can_break_the_promise() -> None:
    """However little it has to do just now: its next prompts would meet the answers."""
    world = world_of(p0="prefill", d0="decode")
    world.fleet.on_load("d0", 1, WAITED_FOR)
    assert filtered(world.decide(SHORT, itl_deadline_ms=500.0))["p0"] == "role"
    world = world_of(p0="prefill", d0="decode", itl_target_ms=200.0)
    world.fleet.on_load("d0", 1, WAITED_FOR)
    assert filtered(world.decide(SHORT, itl_deadline_ms=199.0))["p0"] == "role"
    assert world.decide(SHORT, itl_deadline_ms=200.0).replica == "p0"


def test_who_has_had_no_prompts_for_long_answers_too() -> None:
    """Hand-offs don't pay there, or nobody asks at length: it would be idle."""
    world = world_of(p0="prefill", d0="decode")
    world.fleet.on_load("d0", 1, WAITED_FOR)
    assert filtered(world.decide(SHORT, itl_deadline_ms=200.0))["p0"] == "role"
    told_idle(world, "p0", "d0")
    world.fleet.on_load("d0", 1, WAITED_FOR)
    assert world.decide(SHORT, itl_deadline_ms=200.0).replica == "p0"


def test_a_long_prompt_goes_to_nobody_who_has_no_room_for_an_answer() -> None:
    """Those that are short of seats would be short of time too."""
    world = world_of(p0="prefill", d0="decode")
    world.fleet.on_load("d0", 1, load(running=27))
    assert filtered(world.decide(LONG, itl_deadline_ms=300.0))["p0"] == "role"
    world.fleet.on_load("d0", 1, load(running=29))
    assert filtered(world.decide(SHORT, itl_deadline_ms=300.0))["p0"] == "role"
    assert world.decide(LONG, itl_deadline_ms=300.0).replica == "p0"


def test_who_computes_for_others_answers_too_where_those_that_answer_fall_far_behind() -> None:
    world = world_of(p0="prefill", d0="decode")
    told_idle(world, "p0")
    world.fleet.on_load("d0", 1, load(running=10))
    assert filtered(world.decide(SHORT, itl_deadline_ms=100.0))["p0"] == "role"
    world.fleet.on_load("d0", 1, load(running=30))
    assert world.decide(SHORT, itl_deadline_ms=100.0).replica == "p0"


def test_only_those_are_asked_to_compute() -> None:
    world = world_of(p0="prefill", d0="decode", r0="both")
    decision = world.decide(LONG, computes=True)
    assert filtered(decision) == {"p0": None, "d0": "role", "r0": "role"}
    alone = world_of(d0="decode", r0="both")
    assert isinstance(alone.brain.decide(alone.query(LONG, computes=True)), NoReplica)


def test_where_nobody_else_is_there_it_answers_all_the_same() -> None:
    world = world_of(p0="prefill", d0="decode")
    world.fleet.link_state("d0", 1, False)
    assert world.decide(SHORT).replica == "p0"
    assert filtered(world.decide(LONG)) == {"p0": None, "d0": "no_link"}


def test_a_long_cold_prompt_goes_to_one_that_does_both() -> None:
    world = world_of(d0="decode", r0="both")
    assert filtered(world.decide(LONG)) == {"r0": None, "d0": "role"}
    world = world_of(d0="decode", r0="both")
    world.fleet.on_load("r0", 1, load(queued_prefill_tokens=5_000, waiting=1))
    assert world.decide(LONG).replica == "d0"


def test_where_answers_were_promised_more_it_waits_for_one_that_does_both() -> None:
    world = world_of(d0="decode", r0="both")
    world.fleet.on_load("r0", 1, load(queued_prefill_tokens=5_000, waiting=1))
    assert world.decide(SHORT, itl_deadline_ms=100.0).replica == "d0"
    decision = world.decide(LONG)  # what others were promised counts
    assert filtered(decision) == {"r0": None, "d0": "role"}
    world.clock.pass_s(KEPT_S + 1)
    for name, said in (("d0", load()), ("r0", load(queued_prefill_tokens=9_000, waiting=1))):
        world.fleet.on_load(name, 1, said)
        world.hold(name)
    assert world.decide(prompt((3, 40))).replica == "d0"


def test_a_long_prompt_that_is_warm_goes_where_it_is_warm() -> None:
    world = world_of(d0="decode", r0="both")
    world.hold("d0", LONG)
    assert len(LONG) * BLOCK_TOKENS > 256
    decision = world.decide(LONG)
    assert decision.replica == "d0"
    assert filtered(decision) == {"d0": None, "r0": None}


def test_those_that_answer_compute_where_nobody_else_is_there() -> None:
    world = world_of(d0="decode", d1="decode")
    world.fleet.on_load("d0", 1, load(queued_prefill_tokens=5_000, waiting=1))
    assert world.decide(LONG).replica == "d1"


def test_a_pin_is_heeded_whatever_the_role() -> None:
    world = world_of(p0="prefill", d0="decode")
    assert world.decide(SHORT, pin="p0").replica == "p0"
    assert world.decide(LONG, pin="d0").replica == "d0"


def test_an_unknown_role_does_both() -> None:
    world = world_of(r0="something new", d0="decode")
    assert filtered(world.decide(LONG)) == {"r0": None, "d0": "role"}
