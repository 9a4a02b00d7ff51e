"""What a replica is there for decides what it may be asked; never whether anybody answers."""

from __future__ import annotations

from events.decision import RouteDecision
from router.choice.route import NoReplica
from tests.router.kit import BLOCK_TOKENS, World, hello, load, prompt

LONG = prompt((1, 40))
SHORT = prompt((2, 4))


def world_of(**roles: str) -> World:
    world = World()
    for name, role in roles.items():
        world.fleet.on_hello(name, 1, hello(role=role))
        world.fleet.link_state(name, 1, True)
        world.fleet.on_load(name, 1, load())
        world.hold(name)
    return world


def filtered(decision: RouteDecision) -> dict[str, str | None]:
    return {terms.replica: terms.filtered for terms in decision.candidates}


def test_who_computes_for_others_answers_nobody() -> None:
    world = world_of(p0="prefill", d0="decode")
    decision = world.decide(SHORT)
    assert filtered(decision) == {"d0": None, "p0": "role"}
    assert decision.replica == "d0"


def test_who_computes_for_others_answers_too_while_tokens_come_sooner_there() -> None:
    world = world_of(p0="prefill", d0="decode", d1="decode")
    busy = load(running=25, running_context_tokens=9_000)
    world.fleet.on_load("d0", 1, busy)
    assert filtered(world.decide(SHORT))["p0"] == "role"  # d1 is idle
    world.fleet.on_load("d1", 1, busy)
    decision = world.decide(SHORT)
    assert filtered(decision)["p0"] is None
    assert decision.replica == "p0"
    # Between the prompts that it computes tokens would come no sooner.
    world.keep_busy("p0")
    for name in ("d0", "d1"):
        world.fleet.on_load(name, 1, busy)
    assert filtered(world.decide(SHORT))["p0"] == "role"


def test_prompts_count_where_answers_are_given_too() -> None:
    """With one row each: tokens come later where prompts take most of the time."""
    world = world_of(p0="prefill", d0="decode")
    for name in ("p0", "d0"):
        world.fleet.on_load(name, 1, load(running=1, running_context_tokens=100))
    assert filtered(world.decide(SHORT))["p0"] == "role"
    world.keep_busy("d0")
    for name in ("p0", "d0"):
        world.fleet.on_load(name, 1, load(running=1, running_context_tokens=100))
    assert filtered(world.decide(SHORT))["p0"] is None


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
    world.fleet.on_load("r0", 1, load(queued_prefill_tokens=5_000, waiting=1))
    decision = world.decide(LONG)
    assert filtered(decision) == {"r0": None, "d0": "role"}
    assert world.decide(SHORT).replica == "d0"


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
