"""Filters, prices and choices of the whole pool at once, against plain Python one by one."""

from __future__ import annotations

import random
import shutil

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from events.decision import CandidateTerms
from events.load import DecodeFit, PrefillFit
from router.choice.cost import NumpyPricer
from router.choice.field import SHOWN
from router.choice.pricer import native_pricer
from router.choice.reserve import SIZES, Booked
from router.choice.sheet import (
    BEST,
    EVIDENCE,
    LINE,
    ROW,
    TERMS,
    Below,
    Best,
    Demand,
    Pricer,
    Prices,
    Sheet,
)
from router.fleet.board import row_of
from router.locality.index import DigestIndex
from router.locality.optimistic import OptimisticEntries
from router.policies.base import Candidate
from tests.router.kit import POOL, SHAPE, World, digest_bits, hello, load, promised, prompt
from tests.router.oracle import pick as oracle_pick
from tests.router.oracle.cost import credit
from tests.router.oracle.score import Candidate as OracleCandidate
from tests.router.oracle.score import Scorer as OracleScorer

SHARED = prompt((0, 6))
CHAINS = [prompt((0, 6), (seed, 12)) for seed in range(1, 5)]
DIGESTS = ((), (SHARED,), (CHAINS[0],), (CHAINS[1], CHAINS[2]), (CHAINS[3],))


def fleet_of(world: World, rng: random.Random, replicas: int) -> None:
    """Replicas of all kinds: slow, full, draining, silent, unlinked, refused, without load."""
    for number in range(replicas):
        name = f"r{number}"
        odd = rng.random()
        model = "other" if odd < 0.05 else "tiny"
        world.fleet.on_hello(
            name, 1, hello(model=model, max_running=rng.choice([2, 32]), context_tokens=4_096)
        )
        if odd > 0.1:
            world.fleet.link_state(name, 1, True)
        if odd < 0.95:
            world.fleet.on_load(name, 1, some_load(rng))
        if rng.random() < 0.8:
            world.hold(name, *rng.choice(DIGESTS))
        for _ in range(rng.choice([0, 0, 0, 1, 3])):
            world.fleet.replica_failed(name, 1)


def some_load(rng: random.Random, **changes: object):
    return load(
        waiting=rng.randrange(4),
        running=rng.randrange(5),
        queued_prefill_tokens=rng.choice([0, rng.randrange(3_000)]),
        running_context_tokens=rng.randrange(9_000),
        free_blocks=rng.choice([4_096, rng.randrange(40)]),
        cached_blocks=rng.randrange(2_000),
        prefill=PrefillFit(rng.random(), rng.random(), rng.random() * 1e-3, 1.0),
        decode=DecodeFit(50 * rng.random(), rng.random(), rng.random() * 1e-3, 1.0),
        draining=rng.random() < 0.05,
        prompt_tokens_total=rng.randrange(100_000),
        cached_tokens_total=rng.randrange(50_000),
        **changes,
    )


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), replicas=st.integers(1, 40))
def test_choices_are_those_of_one_by_one(seed: int, replicas: int) -> None:
    rng, world = random.Random(seed), World(seed=seed)
    brain, policy = world.brain, oracle_pick.Warmroute()
    oracle = OracleScorer(world.fleet, brain.ledger, brain.optimistic, brain.router_boot)
    fleet_of(world, rng, replicas)
    for _ in range(20):
        world.clock.pass_s(rng.choice([0.0, 0.3, 2.0]))
        brain.optimistic.expire(world.clock())
        world.fleet.check()
        for _ in range(rng.randrange(3)):
            seen = {brain.router_boot: rng.randrange(20)}
            world.fleet.on_load(f"r{rng.randrange(replicas)}", 1, some_load(rng, seen=seen))
        query = world.query(
            rng.choice(CHAINS),
            ttft_deadline_ms=rng.choice([None, 1e6]),
            exclude=frozenset({f"r{rng.randrange(replicas)}"} if rng.random() < 0.2 else ()),
        )
        expected = oracle.survey(query, brain._output_tokens, world.clock())
        found = brain._scorer.survey(query, brain._output_tokens, world.clock())
        assert [c.replica for c in found] == list(expected.scored)
        for mine, theirs in zip(found, expected.candidates(), strict=True):
            same(mine, found.shown(mine.replica)[0], theirs)
            of, oracle_of = found.scored(mine.replica), expected.scored[mine.replica]
            assert (of.cached_tokens, of.digest_blocks, of.new_blocks) == (
                oracle_of.cached_tokens,
                oracle_of.digest_blocks,
                oracle_of.price.new_blocks,
            )
            assert of.ttft_ms == pytest.approx(oracle_of.price.ttft_ms)
            usable = credit(oracle_of.member, world.clock()) * oracle_of.cached_tokens
            assert of.usable_tokens == pytest.approx(usable, abs=1.0)
        fit = min(SHOWN, len(expected.scored))
        assert found.shown()[fit:] == list(expected.filtered[: SHOWN - fit])
        if not expected.scored:
            continue
        dice = random.Random()
        dice.setstate(brain.rng.getstate())
        pick = policy.pick(query, expected.candidates(), dice)
        decision = brain.decide(query)
        assert (decision.replica, decision.reason) == (pick.replica, pick.reason)
        best = sorted(expected.candidates(), key=lambda c: -c.terms.score)
        others = [c.replica for c in best if c.replica != decision.replica]
        shown = [decision.replica, *others, *(terms.replica for terms in expected.filtered)]
        assert [terms.replica for terms in decision.candidates] == shown[:16]
        policy.placed(query, expected.candidates(), pick)
        if rng.random() < 0.5:
            world.serve(decision)


def same(mine: Candidate, shown: CandidateTerms, theirs: OracleCandidate) -> None:
    """Equal but for the last bits of numbers."""
    bare, terms = msgspec.to_builtins(theirs), msgspec.to_builtins(shown)
    expected = bare.pop("terms")
    assert msgspec.to_builtins(mine) == bare
    for name, value in expected.items():
        exact = value is None or isinstance(value, str)
        near = value if exact else pytest.approx(value, rel=1e-12, abs=1e-9)
        assert terms[name] == near, name


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32), replicas=st.integers(1, 70))
def test_the_native_pricer_is_its_twin(seed: int, replicas: int) -> None:
    rng, world = random.Random(seed), World()
    fleet_of(world, rng, replicas)
    world.clock.pass_s(rng.choice([0.0, 1.0, 20.0]))
    members = [world.fleet.member(f"r{number}") for number in range(replicas)]
    booked = Booked(requests=3, prefilling=1, unseen_requests=2, unseen_prefill_ms=5.0)
    booked.prefill_ms_of_size[:] = [rng.choice([0.0, rng.random() * 500]) for _ in range(SIZES)]
    rows = [row_of(member, rng.choice([booked, Booked()])) for member in members]
    if rng.random() < 0.5:
        rows[::2] = [rows[0]] * len(rows[::2])
    demand = Demand(rng.randrange(1, 5_000), rng.random() * 100, 16, rng.choice([None, 50.0]))
    asked = np.array([rng.random() < 0.9 for _ in members], np.uint8)
    depths = np.array([rng.choice([0, rng.randrange(300)]) for _ in members], np.int32)
    there = np.array([rng.randrange(depth + 1) for depth in depths.tolist()], np.int32)
    below = None
    if rng.random() < 0.5:
        dice = np.random.default_rng(seed)
        deeper = dice.integers(0, 300, (2, len(members)), np.int32)
        below = Below(deeper, 10.0 * dice.random((len(members), 2, 2)))
    startup_ms = None
    if rng.random() < 0.5:
        startup_ms = np.array([rng.choice([0.0, 500 * rng.random()]) for _ in members])
    question = (demand, world.clock(), asked, below, startup_ms)
    pricers: list[Pricer] = [native_pricer(), NumpyPricer()]
    found = [pricer.price(sheet_of(rows, there, depths), *question) for pricer in pricers]
    same_prices(*found)
    for prices in found:
        best = np.argsort(-prices.terms[:, 0], kind="stable")[:BEST]
        lines, at = prices.lines, prices.rows[best]
        assert lines[:, 0].tolist() == best.tolist()
        assert lines[:, 1].tolist() == at.tolist()
        np.testing.assert_array_equal(lines[:, 2 : 2 + len(TERMS)], prices.terms[best])
        evidence = np.array(rows)[at][:, [ROW.index(name) for name in EVIDENCE]]
        np.testing.assert_array_equal(lines[:, 2 + len(TERMS) : -1], evidence)
        assert lines[:, -1].tolist() == there[at].tolist()


def same_prices(mine: Prices, theirs: Prices) -> None:
    """Equal but for the last bits of numbers."""
    np.testing.assert_array_equal(mine.state, theirs.state)
    np.testing.assert_array_equal(mine.rows, theirs.rows)
    np.testing.assert_allclose(mine.terms, theirs.terms, rtol=1e-12, atol=1e-9)
    assert np.isfinite(mine.terms).all()
    assert mine.best.longest_blocks == theirs.best.longest_blocks
    assert mine.best.least_queued_tokens == theirs.best.least_queued_tokens
    assert mine.best.soonest_ms == pytest.approx(theirs.best.soonest_ms)
    assert mine.best.runner_up == pytest.approx(theirs.best.runner_up)
    for prices in (mine, theirs):
        if len(prices.lines):
            assert list(astuple(prices.best)[4:]) == prices.lines[0].tolist()
        if len(prices.lines) > 1:
            assert prices.best.runner_up == prices.lines[1, 2]


def test_the_best_is_told_as_a_line() -> None:
    assert Best.__struct_fields__[4:] == LINE


def sheet_of(rows: list[tuple[float, ...]], there: np.ndarray, depths: np.ndarray) -> Sheet:
    sheet = Sheet(len(rows))
    sheet.table[:] = rows
    sheet.there[:], sheet.depths[:] = there, depths
    return sheet


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 32), replicas=st.integers(1, 70))
def test_the_native_survey_is_its_twin(seed: int, replicas: int) -> None:
    rng, world = random.Random(seed), World()
    shapes = [SHAPE, replace(SHAPE, k=5)]
    names = [f"r{number}" for number in range(replicas)]
    index = DigestIndex()
    for name in names:
        shape = rng.choice(shapes[: rng.choice([1, 2])])
        if rng.random() < 0.8 and index.place(name, POOL, shape) and rng.random() < 0.9:
            index.reset(name, digest_bits(*rng.choice(DIGESTS), shape=shape))
    rows = {name: row for row, name in enumerate(rng.sample(names, replicas))}
    seats, chain = index.seats(POOL, rows), rng.choice([*CHAINS, SHARED])
    entries = OptimisticEntries()
    for number in range(rng.randrange(20)):
        entries.remember(f"r{rng.randrange(90)}", f"d{number}", rng.choice(CHAINS), 9.0)
    promises = entries.seats(rows)
    booked = Booked(requests=1, prefilling=1, unseen_requests=1, unseen_prefill_ms=9.0)
    fleet_of(world, rng, replicas)
    table = [row_of(world.fleet.member(name), rng.choice([booked, Booked()])) for name in names]
    demand = Demand(rng.randrange(1, 3_000), rng.random() * 100, 16, rng.choice([None, 50.0]))
    asked = rng.choice([None, np.array([rng.random() < 0.9 for _ in names], np.uint8)])
    question = (demand, world.clock(), asked)
    sheets, found = [], []
    for pricer in (native_pricer(), NumpyPricer()):
        empty = np.zeros(replicas, np.int32)
        whole, parts = (sheet_of(table, empty, empty) for _ in range(2))
        found.append(pricer.survey(whole, seats, chain, promises, *question))
        pricer.look(parts, seats, chain, promises)
        same_prices(found[-1], pricer.price(parts, *question))
        np.testing.assert_array_equal(whole.there, seats.depths_of(chain.data))
        for name, depth in promised(entries, chain).items():
            assert name not in rows or whole.depths[rows[name]] >= depth
        sheets.append(whole)
    same_prices(*found)
    np.testing.assert_array_equal(sheets[0].there, sheets[1].there)
    np.testing.assert_array_equal(sheets[0].depths, sheets[1].depths)
