"""The book: its first paragraph tells where a peer wins, and it names no path of a machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tools.bench.book import files
from tools.bench.book.command import RESULTS, main
from tools.bench.book.goals import goals
from tools.bench.book.scenarios import ALL, Scenario
from tools.bench.book.text import HIGHER, SHOWN, book, wins
from tools.bench.live.report import ROWS
from tools.errors import CommandError
from tools.sim.generate import KINDS, generate
from tools.sim.plot import draw
from tools.sim.settings import Settings
from tools.sim.simulate import EVERY, seek_capacity, simulate
from tools.sim.table import COLUMNS, title

SCENARIO = Scenario("x", "A scenario", "groups:groups=4,system=600,rates=4,stage_s=3,output=20")


def result(**policies: dict[str, float]) -> dict[str, Any]:
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


def test_no_column_of_the_tables_is_left_out_of_the_comparison() -> None:
    settings = Settings(policy="warmroute", replicas=2)
    figures = simulate(generate(SCENARIO.trace), settings, ["warmroute"], 2.0)["policies"][
        "warmroute"
    ]
    sign = {key: 1 if key in HIGHER else -1 for key in SHOWN}
    better = {
        key: abs(value) * (1 + sign[key] / 2) + sign[key]
        for key, value in figures.items()
        if key in sign
    }
    of = {**result(), "policies": {"warmroute": figures, "weighted": figures | better}}
    assert len(wins(of)) == len(SHOWN) - 1  # a capacity wasn't sought
    shown = {"e2e_p50_s", "e2e_p90_s", "e2e_p99_s"} ^ COLUMNS.keys()
    assert SHOWN.keys() == shown


def test_without_figures_the_book_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match="no figures"):
        main(["--only-write"])


def test_a_book_of_less_than_all_stays_beside_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    before = RESULTS.read_bytes()
    (tmp_path / "bench-out").mkdir()
    (tmp_path / "bench-out" / "siblings.json").write_text(json.dumps(result(warmroute={})))
    assert main(["--only-write"]) == 0
    assert "the book is bench-out/RESULTS.md" in capsys.readouterr().out
    assert "Not simulated yet" in (tmp_path / "bench-out" / "RESULTS.md").read_text()
    assert RESULTS.read_bytes() == before


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


@pytest.mark.slow
def test_only_what_was_measured_is_drawn(tmp_path: Path) -> None:
    trace, base = generate(SCENARIO.trace), Settings(policy="warmroute", replicas=1)
    sought = seek_capacity(trace, base, ["warmroute", "random"], 0.3)
    for number, of in enumerate((sought, simulate(trace, base, ["warmroute"], 2.0, 0.3))):
        file = tmp_path / f"{number}.png"
        draw(of, file)
        assert file.read_bytes().startswith(b"\x89PNG")


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
    assert goals([(SCENARIO, of)]) == []


def test_a_capacity_is_to_be_far_above_on_one_trace_and_below_on_none() -> None:
    def sought(name: str, ours: float, theirs: float) -> tuple[Scenario, dict[str, Any]]:
        of = dataclasses.replace(SCENARIO, mooncake=True, capacity_slo_s=2.0, bound="bound")
        loads = {"warmroute": ours, "random": theirs, "weighted": 0.5}
        policies = {policy: {"capacity_load": load} for policy, load in loads.items()}
        return dataclasses.replace(of, name=name, title=name), {"policies": policies}

    most = {"policies": {"warmroute": {"capacity_load": 1.5}}}
    bound = (dataclasses.replace(SCENARIO, name="bound"), most)
    found = goals([sought("low", 1.0, 1.1), sought("high", 1.3, 1.0), bound])
    assert [(goal.where, goal.met) for goal in found] == [
        ("low", False),
        ("high", True),
        ("high", True),
    ]
    assert "1.500 where nothing is ever evicted" in found[-1].words
    assert "| 1.300 | yes |" in f"| {' | '.join(found[-1].row())} |"
    assert not goals([sought("low", 1.2, 1.0)])[-1].met


def test_how_long_a_simulation_may_take_is_a_goal_of_its_own() -> None:
    bounded = dataclasses.replace(SCENARIO, cpu_bound_s=120.0)
    of = {"policies": {"warmroute": {}}, "cpu_s": {"warmroute": 46.3}}
    (goal,) = goals([(bounded, of)])
    assert (goal.ours, goal.theirs, goal.met) == (46.3, 120.0, True)


def test_figures_are_means_over_seeds_and_say_which_code_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files.OUT.mkdir()
    older = result(warmroute={"ttft_mean_s": 1.0}, random={"ttft_mean_s": 4.0})
    (files.OUT / "x.json").write_text(json.dumps(older))
    read = files.read(SCENARIO)
    assert read is not None
    assert read["code"] == {"warmroute": "earlier", "random": "earlier"}
    plain = dict.fromkeys(COLUMNS, 1.0)
    made = [
        files.Simulated(
            "warmroute", seed, {**older["settings"], "seed": seed}, plain | {"ttft_mean_s": s}, 3.0
        )
        for seed, s in ((1, 2.0), (2, 3.0))
    ]
    files.write(SCENARIO, made)
    read = files.read(SCENARIO)
    assert read is not None
    assert read["policies"]["warmroute"]["ttft_mean_s"] == 2.5
    assert read["policies"]["random"]["ttft_mean_s"] == 4.0
    text = book([(SCENARIO, read)], [], "v.")
    assert "Means over seeds (warmroute 2); ours: mean TTFT 2 to 3" in text
    assert "earlier (random)" in text


def test_other_settings_start_a_file_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files.OUT.mkdir()
    older = result(random={})
    (files.OUT / "x.json").write_text(json.dumps(older))
    settings = {**older["settings"], "load": 2.0}
    files.write(SCENARIO, [files.Simulated("warmroute", 1, settings, {"ttft_mean_s": 1.0}, 3.0)])
    read = files.read(SCENARIO)
    assert read is not None
    assert list(read["policies"]) == ["warmroute"]


def test_the_order_of_policies_is_that_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files.OUT.mkdir()
    base, plain = result()["settings"], dict.fromkeys(COLUMNS, 1.0)
    files.write(SCENARIO, [files.Simulated(name, 1, base, plain, 3.0) for name in EVERY])
    read = files.read(SCENARIO)
    assert read is not None
    assert list(read["code"]) == list(read["cpu_s"]) == list(EVERY)


def _target(ttft: float, over: tuple[float, float, float] | None) -> dict[str, Any]:
    figure = {"value": ttft, "low": ttft - 1, "high": ttft + 1}
    ratio = dict(zip(("value", "low", "high"), over, strict=True)) if over else None
    return {
        **{key: figure for _, key, _ in ROWS},
        "slo_share": figure,
        "over_first": {"ttft_mean_ms": ratio} if ratio else {},
        "errors": {},
        "requests": 9,
    }


def test_a_live_peer_that_wins_beyond_doubt_is_told_first() -> None:
    settings = dict.fromkeys(("rounds", "requests", "seed", "trace", "machine", "slo"), 1)
    settings |= dict.fromkeys(("requests_per_s", "utilisation", "machine_cpu_share"), 0.5)
    about = "peer 1.0: --port 45123 --worker-urls http://127.0.0.1:1234 --folder /tmp/x"
    targets = {
        "warmroute": _target(9.0, None),
        "peer": _target(7.0, (0.8, 0.7, 0.9)),
        "other": _target(8.0, (0.9, 0.8, 1.1)),
        "broken": _target(0.0, None) | {"errors": {"http 401": 9}},
    }
    live = {"settings": settings | {"targets": {"peer": about}}, "targets": targets}
    text = book([], [], "v.", live)
    told = text.split("\n\n")[1]
    assert "lower with peer (0.80 [0.70, 0.90] of ours)." in told
    assert "other" not in told
    assert "| peer | 7 [6, 8] |" in text
    assert "no request was answered: broken ({'http 401': 9})." in text
    assert "/tmp" not in text
    assert "45123" not in text
