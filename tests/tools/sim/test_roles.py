"""Simulated fleets whose replicas have roles: the router's own pairs, devices that take time."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path

import pytest

from tests.tools.sim.test_world import times
from tools.cli import main
from tools.sim.faults import Fault
from tools.sim.generate import generate
from tools.sim.profiles import DEVICES
from tools.sim.roles import figures
from tools.sim.run import Run
from tools.sim.settings import Settings
from tools.sim.tiers import TierSpec
from tools.sim.world import World

STORE = (TierSpec(1 << 20, 12.5, 0.5, True),)
MIX = generate("mixed:rates=6,stage_s=8,long=4000,output=60")


def settings(**changes: object) -> Settings:
    base = Settings(policy="warmroute", replicas=0, prefill=2, decode=2, tiers=STORE)
    return dataclasses.replace(base, **changes)


def long_ones(run: Run) -> list[str]:
    return [r.prefilled_by for r in run.records if r.prompt_tokens == 4_000]


def test_long_prompts_are_computed_by_one_and_answered_by_another() -> None:
    run = World(MIX, settings(load=0.4, itl_deadline_ms=1.0)).run()
    assert len(run.records) == len(MIX.calls)
    assert {r.replica for r in run.records} == {"d0", "d1"}
    assert sum(map(bool, long_ones(run))) > len(long_ones(run)) / 2
    for record in run.records:
        assert not record.failed
        assert record.e2e_s >= record.ttft_s > 0
        if record.prompt_tokens < 256:
            assert not record.prefilled_by
        elif record.prefilled_by:
            assert record.prefilled_by in ("p0", "p1")
            assert record.cached_tokens == 3_900


@pytest.mark.slow
def test_a_run_repeats_to_the_bit() -> None:
    assert times(World(MIX, settings()).run()) == times(World(MIX, settings()).run())


@pytest.mark.slow
def test_whatever_can_be_handed_off_is_where_that_is_asked_for() -> None:
    assert all(long_ones(World(MIX, settings(always_split=True, load=0.4)).run()))


@pytest.mark.parametrize("victim", ["p0", "d0"])
@pytest.mark.parametrize("what", ["die", pytest.param("restart", marks=pytest.mark.slow)])
def test_K2_a_replica_that_dies_loses_no_request(victim: str, what: str) -> None:
    faults = tuple(Fault(at_s, what, victim) for at_s in ([1.0] if what == "die" else [0.5, 1.5]))
    world = World(MIX, settings(always_split=True, faults=faults))
    run = world.run()
    assert len(run.records) == len(MIX.calls)
    assert all(r.e2e_s > 0 and not r.failed for r in run.records)
    assert all(not seat.computing and not seat.open for seat in world._seats.values())
    assert not world._splitter.quota.pledged("d0")
    assert not world._splitter.quota.pledged("d1")


def test_a_store_that_is_too_slow_is_not_used() -> None:
    slow = (TierSpec(1 << 20, 0.01, 0.5, True),)
    assert not any(long_ones(World(MIX, settings(tiers=slow)).run()))


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"decode": 0}, "have to answer"), ({"tiers": ()}, "a store that all share")],
)
def test_settings_that_can_t_be(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        settings(**changes)


@pytest.mark.slow
def test_the_command_says_the_ratio_and_simulates_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    into = tmp_path / "roles.json"
    words = "sim mixed:rates=4,stage_s=4,long=2000,output=20 --pd --replicas 3 --load 0.5"
    assert main([*words.split(), "--json", str(into)]) == 0
    report = json.loads(into.read_text())
    assert report["best"] in ("1:2", "2:1")
    assert [run["how"] for run in report["runs"]][:3] == ["colocated", "by cost", "always split"]
    assert all(0 <= run["slo_share"] <= 1 for run in report["runs"])
    said = capsys.readouterr()
    assert report["best"] in said.out
    assert said.err.splitlines()[:2] == [
        "simulating 3 replicas that do both",
        "simulating 1:2: by cost, then always split",
    ]


@pytest.mark.slow
def test_at_no_ratio_are_roles_worse_than_none_by_more_than_a_little() -> None:
    """Beyond what the fleet can take."""
    trace = generate("mixed:rates=10,stage_s=12")
    base = settings(load=1.1, tiers=(TierSpec(1 << 22, 12.5, 0.5, True),), itl_deadline_ms=50.0)

    def good(prefill: int, decode: int, replicas: int = 0) -> float:
        of = dataclasses.replace(base, prefill=prefill, decode=decode, replicas=replicas)
        return figures("", trace, of, slo_ttft_s=2.0, slo_tpot_ms=50.0)["slo_share"]

    colocated = good(0, 0, replicas=4)
    for prefill in (1, 2, 3):
        assert good(prefill, 4 - prefill) >= 0.97 * colocated


SMALLEST = settings(
    decode=1,
    prefill=1,
    tiers=(TierSpec(1 << 22, 2.0, 1.0, True),),
    device=DEVICES["cpu-smollm2"],
    kv_tokens=51_200,
)
TOGETHER = dataclasses.replace(SMALLEST, replicas=2, prefill=0, decode=0)
MEASURED = generate("mixed:rates=2,stage_s=90,long=1000,brief=12,short=50,output=100,block=25")


APART = dataclasses.replace(SMALLEST, always_split=True)


@functools.cache
def latencies(of: Settings, load: float) -> list[tuple[float, float]]:
    """Each request's TTFT in s and TPOT in ms."""
    records = World(MEASURED, dataclasses.replace(of, load=load)).run().records
    return [(record.ttft_s, 1e3 * record.tpot_s) for record in records]


def goodput(of: Settings, load: float, tpot_ms: float = math.inf) -> float:
    return sum(ttft_s <= 2.0 and ms <= tpot_ms for ttft_s, ms in latencies(of, load))


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.5, 0.7, 0.9, 1.1])
def test_without_a_promise_one_of_each_are_no_worse_than_two_that_do_both(load: float) -> None:
    """The smallest fleet, of slow ones: kept apart, whoever waited for the only one that computes
    would be late."""
    assert goodput(SMALLEST, load) >= 0.97 * goodput(TOGETHER, load)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "promised_ms"),
    [(0.7, 60.0), (0.9, 60.0), (0.9, 90.0), (0.9, 120.0), (0.9, 200.0)],
)
def test_with_a_promise_they_are_no_worse_than_the_better_of_both_ways(
    load: float, promised_ms: float
) -> None:
    """Prompts and answers apart where it is tight, together where it is not."""
    better = max(goodput(of, load, promised_ms) for of in (TOGETHER, APART))
    by_cost = dataclasses.replace(SMALLEST, itl_deadline_ms=promised_ms)
    assert goodput(by_cost, load, promised_ms) >= 0.97 * better


@pytest.mark.slow
@pytest.mark.parametrize("prefill", [1, 2, 3])
def test_where_hand_offs_don_t_pay_nobody_is_kept_free_for_them(prefill: int) -> None:
    trace = generate("mixed:rates=10,stage_s=15")
    slow = settings(load=0.8, tiers=(TierSpec(1 << 22, 3.0, 0.5, True),), itl_deadline_ms=50.0)

    def good(prefill: int, decode: int, replicas: int = 0) -> float:
        of = dataclasses.replace(slow, prefill=prefill, decode=decode, replicas=replicas)
        return figures("", trace, of, slo_ttft_s=2.0, slo_tpot_ms=50.0)["slo_share"]

    assert good(prefill, 4 - prefill) >= 0.97 * good(0, 0, replicas=4)
    run = World(trace, dataclasses.replace(slow, prefill=3, decode=1)).run()
    assert {record.replica[0] for record in run.records} == {"d", "p"}


def test_the_profile_s_bytes_are_what_moves() -> None:
    run = World(MIX, settings(always_split=True, load=0.4)).run()
    per_token = DEVICES["h100-8b"].kv_bytes_per_token
    assert run.fetched_bytes == 3_900 * per_token * len(long_ones(run))
