"""The book: its first paragraph tells where a peer wins, and it names no path of a machine."""

from __future__ import annotations

import dataclasses

import pytest

from tools.bench.book.command import main
from tools.bench.book.goals import goals
from tools.bench.book.scenarios import ALL, Scenario
from tools.bench.book.text import book, wins
from tools.errors import CommandError
from tools.sim.generate import KINDS, generate
from tools.sim.settings import Settings
from tools.sim.simulate import seek_capacity, simulate
from tools.sim.table import COLUMNS, title

SCENARIO = Scenario("x", "A scenario", "groups:groups=4,system=600,rates=4,stage_s=3,output=20")


def result(**policies: dict[str, float]) -> dict[str, object]:
    simulated = simulate(
        generate(SCENARIO.trace), Settings(policy="warmroute", replicas=2), [], 2.0
    )
    plain = dict.fromkeys(COLUMNS, 1.0)
    return {**simulated, "policies": {name: plain | f for name, f in policies.items()}}


def test_a_peer_that_wins_is_told_first_by_how_much() -> None:
    of = result(
        warmroute={"ttft_p90_s": 2.0},
        weighted={"ttft_p90_s": 1.0, "cached_token_ratio": 1.001},
        preble={"ttft_p90_s": 1.5, "ttft_mean_s": 3.0},
        clairvoyant={"ttft_p90_s": 0.1, "ttft_mean_s": 0.1},
    )
    assert [str(win) for win in wins(of)] == ["weighted in TTFT p90 (1 against 2, 50.0%)"]
    first, told, *_ = book([(SCENARIO, of)], [], "v.").split("\n\n")
    assert first.startswith("# ")
    assert "within 0.5% of it, in 1 of 1" in told
    assert "A scenario: weighted in TTFT p90" in told


def test_without_a_winning_peer_that_is_what_it_says() -> None:
    text = book([(SCENARIO, result(warmroute={}, random={}))], [], "v.")
    assert "No peer wins" in text
    assert "| random |" in text
    assert "Not simulated yet" not in text


def test_what_was_not_simulated_is_said() -> None:
    assert "Not simulated yet: That one." in book([], ["That one"], "v.")


def test_real_figures_fit_the_book() -> None:
    settings = Settings(policy="warmroute", replicas=2)
    of = simulate(generate(SCENARIO.trace), settings, ["warmroute", "random"], 2.0)
    assert SCENARIO.trace in book([(SCENARIO, of)], [], "v.")


def test_scenarios_have_names_of_their_own_and_traces_that_can_be_made() -> None:
    assert len({scenario.name for scenario in ALL}) == len(ALL)
    for scenario in ALL:
        if scenario.trace.partition(":")[0] in KINDS:
            generate(scenario.trace)
        else:
            assert "/" not in scenario.trace


def test_an_unknown_scenario_is_refused() -> None:
    with pytest.raises(CommandError, match="unknown scenario 'noon'"):
        main(["noon"])


def test_one_policy_alone_is_no_comparison_and_tells_how_long_it_took() -> None:
    of = {**result(warmroute={"ttft_mean_s": 9.0}), "cpu_s": {"warmroute": 41.6}}
    text = book([(SCENARIO, of)], [], "v.")
    assert "of it, in 0 of 0" in text
    assert "42 s of one core's CPU" in text


def test_a_capacity_is_told_without_times_and_is_no_mean() -> None:
    trace, base = generate(SCENARIO.trace), Settings(policy="warmroute", replicas=1)
    of = seek_capacity(trace, base, ["warmroute", "random"], 0.3)
    assert "load sought" in title(of["settings"])
    of["policies"]["warmroute"]["capacity_load"] = 1.0
    of["policies"]["random"]["capacity_load"] = 1.5
    text = book([(dataclasses.replace(SCENARIO, capacity_slo_s=0.3), of)], [], "v.")
    assert "random in capacity (1.5 against 1, 50.0%)" in text
    assert "of it, in 0 of 0" in text
    assert "| random | 1.50 |" in text


def test_goals_are_held_against_the_best_peer_and_the_bound() -> None:
    trace = dataclasses.replace(SCENARIO, mooncake=True)
    of = result(
        warmroute={"ttft_mean_s": 1.0, "cached_token_ratio": 0.97},
        random={"ttft_mean_s": 1.2, "cached_token_ratio": 1.0},
        weighted={"ttft_mean_s": 3.0, "cached_token_ratio": 0.2},
        clairvoyant={"ttft_mean_s": 0.95, "cached_token_ratio": 2.0},
    )
    assert [(goal.whose, goal.met) for goal in goals([(trace, of)])] == [
        ("random", True),
        ("random", False),
        ("clairvoyant", True),
    ]
    sought = dataclasses.replace(trace, capacity_slo_s=2.0)
    of = {"policies": {"warmroute": {"capacity_load": 1.3}, "random": {"capacity_load": 1.0}}}
    (capacity,) = goals([(sought, of)])
    assert capacity.met
    assert "| 1.300 | yes |" in f"| {' | '.join(capacity.row())} |"
    assert goals([(SCENARIO, of)]) == []
