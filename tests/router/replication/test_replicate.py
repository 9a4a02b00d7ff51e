"""When a hot head goes to one more replica, and when it doesn't. The mover here only notes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from events.errors import CoreError, UserError
from events.output import Usage
from router.replication import copies, replicate
from router.replication.heat import HeadHeat, HotHead
from router.replication.replicate import FAIR_SHARE, FORCED_OFF, JOINED, LEFT, Replicator
from tests.router.kit import BLOCK_TOKENS, World, hello, load, prompt
from tests.router.replication.test_heat import asked
from tests.waiting import until

HEAD = (1, 40)
HEAD_MS = 40 * BLOCK_TOKENS
"""Its prefill by the kit's time model, 1 ms a token."""


class Mover:
    """Says at once, or when released, that all of it was computed."""

    def __init__(self, world: World) -> None:
        self.asked: list[tuple[int, str]] = []
        self.release = asyncio.Event()
        self.release.set()
        self.error: Exception | None = None
        self.cancelled = 0
        self._world = world

    async def bring(self, head: HotHead, replica: str) -> Usage:
        self.asked.append((head.number, replica))
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        self._world.hold(replica, head.chain)
        return Usage(head.tokens, 0, 1)


class Street(World):
    """A fleet, its traffic, and the replicator that watches both."""

    def __init__(self, replicas: int, share: float = 0.05) -> None:
        super().__init__(replicas)
        self.mover = Mover(self)
        self.heat = HeadHeat(self.clock)
        self.replicator = Replicator(self.brain, self.heat, self.mover, share, self.clock)
        self._tails = 1_000
        self.replicator.round()

    def traffic(self, count: int, head: tuple[int, int] = HEAD) -> list[str]:
        """So many requests with that head and a tail of their own, served at once."""
        went = []
        for _ in range(count):
            self._tails += 1
            keys = prompt(head, (self._tails, 3))
            decision = self.decide(keys)
            self.heat.note(asked(keys), decision)
            went.append(decision.replica)
            self.serve(decision, decision.predicted_cached_tokens)
        return went

    def busy(self, replica: str, queued_tokens: int = 20 * HEAD_MS) -> None:
        """So much waits there."""
        self.fleet.on_load(replica, 1, load(waiting=1, queued_prefill_tokens=queued_tokens))

    def cool(self, *replicas: str) -> None:
        """They hold nothing."""
        for replica in replicas:
            self.brain.cache_cleared(replica)
            if self.fleet.member(replica) is not None:
                self.hold(replica)

    def report(self, *replicas: str) -> None:
        """Heartbeats of idle replicas."""
        for replica in replicas:
            self.fleet.on_load(replica, 1, load())

    async def round(self) -> list[tuple[int, str]]:
        """One look, and its copies to their ends unless held up; what was asked of the mover."""
        before = len(self.mover.asked)
        self.replicator.round()
        await asyncio.sleep(0)
        if self.mover.release.is_set():
            await until(lambda: not self.replicator.copies.running)
        return self.mover.asked[before:]

    @property
    def ends(self) -> list[tuple[str, str, str]]:
        return [(of.why, of.replica, of.status) for of in self.replicator.copies.records]


async def hot(street: Street, holder: str = "r0") -> None:
    """The head is hot, and only `holder` has it."""
    street.hold(holder, prompt(HEAD))
    assert set(street.traffic(8)) == {holder}
    assert await street.round() == []


async def test_R2_while_nobody_is_forced_off_nothing_is_copied() -> None:
    street = Street(4)
    await hot(street)
    for _ in range(20):
        street.clock.pass_s(0.5)
        street.report("r0", "r1", "r2", "r3")
        street.traffic(4)
        assert await street.round() == []
    assert street.replicator.budget.spent_ms_total == 0


def force_off(street: Street, times: int = 2) -> None:
    """Requests that must leave r0; whom they go to is as cold as before."""
    for _ in range(times):
        street.busy("r0")
        assert street.traffic(1) != ["r0"]
        street.cool("r1", "r2", "r3")


async def test_R2_what_is_forced_off_brings_the_head_to_the_least_loaded() -> None:
    street = Street(4)
    await hot(street)
    force_off(street)
    street.busy("r1", 100)
    street.busy("r2", 100)
    number = street.heat.heads[0].number
    assert await street.round() == [(number, "r3")]
    assert street.ends == [(FORCED_OFF, "r3", "done")]
    assert street.replicator.budget.spent_ms_total == pytest.approx(HEAD_MS, rel=0.05)
    assert street.replicator.copies.computed_tokens_total == HEAD_MS
    assert set(street.traffic(3)) == {"r3"}
    assert await street.round() == [], "once was enough"


async def test_the_fleets_share_limits_what_a_storm_can_ask_for() -> None:
    street = Street(4, share=0.01)
    await hot(street)
    spent = []
    for _ in range(60):
        force_off(street)
        street.report("r1", "r2", "r3")
        await street.round()
        street.clock.pass_s(1.0)
        spent.append(street.replicator.budget.spent_ms_total)
    assert street.replicator.copies.totals[FORCED_OFF, "done"] >= 1
    saved_up_ms, per_s_ms = 600, 40
    assert all(
        ms <= saved_up_ms + per_s_ms * second + 1.5 * HEAD_MS for second, ms in enumerate(spent)
    )


async def test_a_busy_target_gets_nothing() -> None:
    street = Street(2)
    await hot(street)
    force_off(street)
    street.busy("r1", 200)
    assert await street.round() == []
    street.report("r1")
    assert len(await street.round()) == 1


async def test_a_server_of_another_kind_is_no_target() -> None:
    street = Street(1)
    await hot(street)
    street.fleet.on_hello("v0", 1, hello(engine="openai"))
    street.fleet.link_state("v0", 1, True)
    street.report("v0")
    street.hold("v0")
    force_off(street)
    street.report("v0")
    assert await street.round() == []
    drain(street, "r0")
    assert await street.round() == []


async def test_a_head_served_beyond_its_fair_share_spreads_once_it_waits() -> None:
    street = Street(4)
    await hot(street)
    street.busy("r0", 3 * HEAD_MS // 4)
    assert len(await street.round()) == 1
    assert street.ends[0][0] == FAIR_SHARE


async def test_one_at_a_time_for_each_replica_and_only_once() -> None:
    street = Street(2)
    await hot(street)
    street.hold("r0", prompt(HEAD), prompt((2, 40)))
    assert set(street.traffic(8, (2, 40))) == {"r0"}
    street.mover.release.clear()
    for head in (HEAD, (2, 40)):
        for _ in range(3):
            street.busy("r0")
            street.traffic(1, head)
            street.cool("r1")
    street.report("r1")
    first = await street.round()
    assert len(first) == 1
    assert await street.round() == []
    street.mover.release.set()
    await until(lambda: not street.replicator.copies.running)
    street.mover.error = UserError(CoreError(status=503, message="x"))
    second = await street.round()
    assert len(second) == 1
    assert second != first
    assert await street.round() == [], "what failed is left alone for a while"
    assert [status for _, _, status in street.ends] == ["done", "failed"]


async def test_E8_a_replica_that_joins_gets_what_is_hot_before_its_share() -> None:
    street = Street(2)
    await hot(street)
    street.hold("r0", prompt(HEAD), prompt((2, 40)))
    street.traffic(6, (2, 40))
    await street.round()
    street.join("r9")
    assert street.decide(prompt((77, 9))).replica in {"r0", "r1", "r9"}
    brought = await street.round() + await street.round()
    assert {replica for _, replica in brought} == {"r9"}
    assert len(brought) == 2
    assert {why for why, _, _ in street.ends} == {JOINED}
    assert street.replicator.budget.spent_ms_total == 0, "it is the newcomer's own time"


async def test_E8_a_new_life_counts_as_joining_and_the_old_one_as_left() -> None:
    street = Street(2)
    await hot(street)
    street.join("r0", boot=2)
    street.mover.release.clear()
    assert [replica for _, replica in await street.round()] == ["r0"]
    street.mover.release.set()
    await until(lambda: not street.replicator.copies.running)
    assert street.ends == [(JOINED, "r0", "done")]


async def test_a_replica_whose_digest_is_on_its_way_is_waited_for() -> None:
    street = Street(2)
    await hot(street)
    street.join("r9")
    street.fleet.on_digest_unknown("r9", 1, "gap")
    assert await street.round() == []
    street.hold("r9", prompt(HEAD))
    assert await street.round() == []
    street.join("r8")
    street.fleet.on_digest_unknown("r8", 1, "gap")
    await street.round()
    street.clock.pass_s(1.5)
    street.report("r0", "r1", "r9", "r8")
    assert [replica for _, replica in await street.round()] == ["r8"]


async def test_joining_ends_after_a_while() -> None:
    street = Street(2)
    await hot(street)
    street.join("r9")
    street.busy("r9")
    assert await street.round() == []
    street.clock.pass_s(replicate.JOIN_S + 0.1)
    street.report("r0", "r1", "r9")
    assert await street.round() == []


def drain(street: Street, replica: str) -> None:
    street.fleet.on_load(replica, 1, load(draining=True))


def leave(street: Street, replica: str) -> None:
    street.fleet.on_gone(replica, 1, "bye")


@pytest.mark.parametrize("end", [drain, leave])
async def test_R20_what_a_draining_replica_alone_held_is_warmed_elsewhere(
    end: Callable[[Street, str], None],
) -> None:
    street = Street(3)
    await hot(street)
    street.hold("r0", prompt(HEAD), prompt((2, 40)))
    street.hold("r1", prompt((2, 40)))
    street.traffic(6, (2, 40))
    await street.round()
    end(street, "r0")
    number = next(h.number for h in street.heat.heads if h.chain.data == prompt(HEAD).data)
    ((moved, target),) = await street.round()
    assert moved == number
    assert street.ends == [(LEFT, target, "done")]
    assert street.replicator.standing(street.heat.heads[0]).holders
    assert await street.round() == []


async def test_R20_the_hottest_goes_first_and_a_failure_is_made_good_elsewhere() -> None:
    street = Street(3)
    await hot(street)
    street.hold("r0", prompt(HEAD), prompt((2, 40)))
    street.traffic(30, (2, 40))
    street.cool("r1", "r2")
    await street.round()
    hottest = street.heat.heads[0].number
    street.mover.error = UserError(CoreError(status=503, message="x"))
    drain(street, "r0")
    first = await street.round()
    assert first[0][0] == hottest
    street.mover.error = None
    for _ in range(3):
        first += await street.round()
    assert {number for number, _ in first} == {head.number for head in street.heat.heads}
    assert all(street.replicator.standing(head).holders for head in street.heat.heads)


async def test_what_was_evicted_is_not_fetched_back() -> None:
    street = Street(2)
    await hot(street)
    street.cool("r0")
    assert await street.round() == []
    drain(street, "r0")
    assert await street.round() == []


async def test_a_target_that_drains_or_leaves_ends_the_copy() -> None:
    street = Street(4)
    await hot(street)
    street.mover.release.clear()
    force_off(street)
    street.report("r1", "r2", "r3")
    ((_, target),) = await street.round()
    drain(street, target)
    street.replicator.round()
    await until(lambda: (FORCED_OFF, target, "cancelled") in street.ends)
    assert street.mover.cancelled == 1


async def test_a_copy_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "DEADLINE_S", 0.01)
    street = Street(2)
    await hot(street)
    street.mover.release.clear()
    drain(street, "r0")
    await street.round()
    await until(lambda: not street.replicator.copies.running)
    assert street.ends == [(LEFT, "r1", "expired")]
    assert street.mover.cancelled == 1


async def test_nothing_leaks_when_it_is_closed_in_the_middle() -> None:
    street = Street(2)
    await hot(street)
    street.mover.release.clear()
    drain(street, "r0")
    await street.replicator.start()
    await until(lambda: len(street.mover.asked) == 1)
    await street.replicator.close()
    await street.replicator.close()
    assert street.replicator.copies.running == []
    assert street.mover.cancelled == 1
    assert street.ends == [(LEFT, "r1", "cancelled")]


async def test_one_that_is_closed_before_it_began_is_told_of_too() -> None:
    street = Street(2)
    await hot(street)
    drain(street, "r0")
    street.replicator.round()
    await street.replicator.close()
    assert street.mover.asked == []
    assert street.ends == [(LEFT, "r1", "cancelled")]


async def test_several_routers_spend_no_more_than_one() -> None:
    """Each looks for itself, so the share of the fleet's time is divided among them all."""
    streets = [Street(4) for _ in range(3)]
    for street in streets:
        for other in ("a", "b"):
            street.brain.peers.greet(other, 1, street.clock())
        street.clock.pass_s(30.0)
        street.report("r0", "r1", "r2", "r3")
        street.replicator.round()
    alone = Street(4)
    alone.clock.pass_s(30.0)
    alone.report("r0", "r1", "r2", "r3")
    alone.replicator.round()
    budget_ms = alone.replicator.budget.credit_ms
    together_ms = sum(street.replicator.budget.credit_ms for street in streets)
    assert together_ms == pytest.approx(budget_ms)
    # Whoever is not heard any more leaves his part to the others.
    street = streets[0]
    street.clock.pass_s(60.0)
    street.brain.peers.expire(street.clock())
    street.replicator.round()
    street.clock.pass_s(60.0)
    street.replicator.round()
    assert street.replicator.budget.credit_ms == pytest.approx(1e3 * 60.0 * 0.05 * 4)
