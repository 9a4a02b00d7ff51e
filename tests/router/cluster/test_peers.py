"""Shared reservations: whatever is lost, doubled, late or restarted, the sums end up true."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from configs.schema import RouterConfig, TenantConfig
from events.bus import Handler
from events.decision import RouteDecision
from events.envelope import seal
from events.errors import UserError
from events.peer import PeerAsk, PeerDelta, PeerState, Sent
from events.subjects import router_boot_name, router_subject
from events.wire import encode
from router.choice.reserve import Booked
from router.cluster.marks import STEP_BLOCKS, Marks, marks_of
from router.cluster.peers import GONE_S, MAX_OPEN, Peers
from router.cluster.sync import MAX_MARKS_BYTES, STATE_S, PeerSync
from router.cluster.use import SharedUse
from router.tenancy.limits import Limits
from router.tenancy.others import NOTHING
from router.tenancy.tenants import Tenants
from router.waiting.queue import RequestQueue
from tests.router.kit import KEY, Clock, World, hello, load, prompt

REPLICAS = ("r0", "r1", "r2")
ROUTERS = ("a", "b", "c")


class Wire:
    """The bus as one router sees it: what it says waits in `out` until the test carries it."""

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.handler: Handler
        self.gap: Callable[[str], None]

    async def publish(self, subject: str, payload: bytes) -> None:
        self.out.append(payload)

    async def subscribe(self, subject: str, handler: Handler) -> Wire:
        self.handler = handler
        return self

    def on_gap(self, listener: Callable[[str], None]) -> None:
        self.gap = listener

    async def close(self) -> None:
        pass


class Router:
    """One life of one router, without tasks of its own."""

    def __init__(self, name: str, boot: int, clock: Clock, boots: dict[str, int]) -> None:
        self.name, self.boot = name, boot
        self.boot_name = router_boot_name(name, boot)
        self.world = World(clock=clock, router_boot=self.boot_name, seed=boot)
        for replica, its_boot in boots.items():
            self.world.join(replica, its_boot)
        self.wire = Wire()
        acme = TenantConfig(name="acme", requests_per_min=60, max_concurrent=1_000)
        self.tenants = Tenants(KEY, [acme])
        self.limits = Limits(clock)
        queue = RequestQueue(self.world.brain, RouterConfig())
        brain = self.world.brain
        use = self.use = SharedUse(KEY, self.tenants, self.limits, queue, brain.peers)
        self.acme = self.limits.account(self.tenants.named("acme"))
        self.sync = PeerSync(self.wire, "c", name, boot, self.world.brain, use, clock)  # type: ignore[arg-type]
        self.open: dict[int, RouteDecision] = {}
        self.early: set[int] = set()
        self.life: dict[int, int] = {}

    def listen(self) -> None:
        asyncio.run(self._listen())

    async def _listen(self) -> None:
        await self.sync.start()
        await self.sync.close()

    def hear(self, sender: str, payload: bytes) -> None:
        self.wire.handler(router_subject("c", sender, "peers"), payload)

    def booked(self, replica: str) -> tuple[float, ...]:
        member = self.world.fleet.member(replica)
        self.world.brain.peers.note_seen(replica, member.load.seen)
        *sums, sizes = astuple(self.world.brain.peers.booked(replica))
        return (*sums, *sizes)


class ManyRouters(RuleBasedStateMachine):
    """The model keeps, for each router, what is open and where; the rest is the real thing."""

    routers = st.sampled_from(ROUTERS)
    replicas = st.sampled_from(REPLICAS)
    picks = st.integers(0, 30)

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.boots = dict.fromkeys(REPLICAS, 1)
        self.next_boot = 1
        self.seen: dict[str, dict[str, int]] = {replica: {} for replica in REPLICAS}
        self.on_the_way: list[tuple[str, str, bytes]] = []
        self.live: dict[str, Router] = {}
        for name in ROUTERS:
            self.start(name)

    def start(self, name: str) -> None:
        router = Router(name, self.next_boot, self.clock, self.boots)
        self.next_boot += 1
        self.live[name] = router
        router.listen()
        for replica in REPLICAS:
            self.report_to(router, replica)

    def report_to(self, router: Router, replica: str) -> None:
        report = load(seen=dict(self.seen[replica]))
        router.world.fleet.on_load(replica, self.boots[replica], report)

    @rule(name=routers, replica=replicas, blocks=st.integers(1, 6), again=st.booleans())
    def dispatch(self, name: str, replica: str, blocks: int, again: bool) -> None:
        router = self.live[name]
        seed = 1 if again else router.world.asked + 100
        decision = router.world.decide(prompt((seed, blocks)), pin=replica)
        router.open[decision.dispatch_seq] = decision
        router.early.add(decision.dispatch_seq)
        router.life[decision.dispatch_seq] = self.boots[replica]

    def some_open(self, router: Router, pick: int) -> RouteDecision | None:
        numbers = sorted(router.open)
        return router.open[numbers[pick % len(numbers)]] if numbers else None

    @rule(name=routers, pick=picks)
    def first_token(self, name: str, pick: int) -> None:
        router = self.live[name]
        if decision := self.some_open(router, pick):
            router.world.brain.first_token(decision.decision_id, 0, decision.prompt_tokens, 1.0)
            router.early.discard(decision.dispatch_seq)

    @rule(name=routers, pick=picks)
    def end(self, name: str, pick: int) -> None:
        router = self.live[name]
        if decision := self.some_open(router, pick):
            router.world.end(decision, "client_gone")
            del router.open[decision.dispatch_seq]

    @rule(name=routers)
    def tenant_comes(self, name: str) -> None:
        router = self.live[name]
        with suppress(UserError):
            router.acme.request()

    @precondition(lambda self: any(router.acme.inside for router in self.live.values()))
    @rule(name=routers)
    def tenant_leaves(self, name: str) -> None:
        if self.live[name].acme.inside:
            self.live[name].acme.__exit__()

    def others_inside(self, name: str) -> int:
        return sum(router.acme.inside for router in self.live.values() if router.name != name)

    @rule(replica=replicas, pick=picks, deaf=st.sampled_from([None, *ROUTERS]))
    def report(self, replica: str, pick: int, deaf: str | None) -> None:
        for router in self.live.values():
            its = [n for n, made in router.open.items() if made.replica == replica]
            if its:
                last = max(self.seen[replica].get(router.boot_name, 0), its[pick % len(its)])
                self.seen[replica][router.boot_name] = last
        for router in self.live.values():
            if router.name != deaf:
                self.report_to(router, replica)

    @rule(name=routers)
    def tick(self, name: str) -> None:
        router = self.live[name]
        asyncio.run(router.sync.tick())
        said, router.wire.out = router.wire.out, []
        others = [other for other in ROUTERS if other != name]
        self.on_the_way += [(name, other, data) for data in said for other in others]

    @precondition(lambda self: self.on_the_way)
    @rule(pick=picks, late=st.integers(0, 2), times=st.sampled_from([1, 1, 1, 0, 2]))
    def carry(self, pick: int, late: int, times: int) -> None:
        at = min(late, len(self.on_the_way) - 1)
        sender, to, data = self.on_the_way.pop(at)
        for _ in range(times):
            self.live[to].hear(sender, data)

    @rule(name=routers)
    def restart(self, name: str) -> None:
        self.start(name)

    @rule(name=routers)
    def gap(self, name: str) -> None:
        self.live[name].wire.gap("reconnect")

    @rule(replica=replicas)
    def replica_restarts(self, replica: str) -> None:
        self.boots[replica] += 1
        self.seen[replica] = {}
        for router in self.live.values():
            router.world.join(replica, self.boots[replica])
            for number in [n for n, made in router.open.items() if made.replica == replica]:
                del router.open[number]

    @rule(seconds=st.sampled_from([0.01, 0.2, 2.5]))
    def pass_time(self, seconds: float) -> None:
        self.clock.pass_s(seconds)

    @invariant()
    def bounded_and_never_negative(self) -> None:
        for router in self.live.values():
            for replica in REPLICAS:
                assert min(router.booked(replica)) >= -1e-6

    def truth(self, at: str, replica: str) -> tuple[float, ...]:
        """What the others have open there and no report shows, summed anew."""
        unseen: list[tuple[bool, int, float, int, int]] = []
        for router in self.live.values():
            last = self.seen[replica].get(router.boot_name, 0)
            for number, made in router.open.items():
                if router.name != at and made.replica == replica and number > last:
                    tokens = made.prompt_tokens - made.predicted_cached_tokens
                    cached = made.predicted_cached_tokens
                    ms = load().prefill.predict_ms(cached, tokens)
                    blocks = -(-made.prompt_tokens // 16) - cached // 16
                    unseen.append((number in router.early, tokens, ms, made.prompt_tokens, blocks))
        early = [one for one in unseen if one[0]]
        return (
            len(unseen),
            len(early),
            len(unseen),
            len(early),
            sum(one[1] for one in early),
            sum(one[2] for one in early),
            sum(one[3] for one in unseen),
        )

    def heal(self) -> None:
        """The bus works again, and some seconds pass."""
        self.on_the_way.clear()
        for _ in range(4):
            self.clock.pass_s(STATE_S)
            for name in ROUTERS:
                self.tick(name)
            while self.on_the_way:
                self.carry(0, 0, 1)
        for replica in REPLICAS:
            for router in self.live.values():
                self.report_to(router, replica)

    def teardown(self) -> None:
        self.heal()
        for name, router in self.live.items():
            assert router.use.elsewhere("acme").requests == self.others_inside(name)
            for replica in REPLICAS:
                assert router.booked(replica)[:7] == pytest.approx(self.truth(name, replica))
        for router in self.live.values():
            while router.acme.inside:
                router.acme.__exit__()
            for decision in router.open.values():
                router.world.end(decision, "client_gone")
        self.heal()
        for router in self.live.values():
            assert router.world.brain.peers.open == 0
            assert router.use.elsewhere("acme") == NOTHING
            for replica in REPLICAS:
                assert router.world.brain.peers.booked(replica) == Booked()


def test_without_faults_small_messages_alone_tell_the_truth() -> None:
    """No time passes, so that nobody's whole state helps."""
    machine, rng = ManyRouters(), random.Random(5)
    machine.heal()
    for _ in range(200):
        name, pick = rng.choice(ROUTERS), rng.randrange(30)
        step = rng.choice([machine.first_token, machine.end, None])
        (machine.tenant_comes if rng.random() < 0.6 else machine.tenant_leaves)(name)
        if step is None:
            machine.dispatch(name, rng.choice(REPLICAS), rng.randint(1, 6), rng.random() < 0.5)
        else:
            step(name, pick)
        if rng.random() < 0.3:
            machine.report(rng.choice(REPLICAS), pick, None)
        for sender in ROUTERS if rng.random() < 0.7 else ():
            machine.tick(sender)
        if not machine.on_the_way:
            continue
        while machine.on_the_way:
            machine.carry(0, 0, 1)
        if not any(router.use._touched for router in machine.live.values()):
            inside = machine.live["a"].use.elsewhere("acme").requests
            assert inside == machine.others_inside("a")
        for replica in REPLICAS:
            told = machine.live["a"].booked(replica)[:7]
            assert told == pytest.approx(machine.truth("a", replica))
    assert all(view.whole for view in machine.live["a"].world.brain.peers.views(0.0))


TestManyRouters = ManyRouters.TestCase
TestManyRouters.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


def sent(seq: int, replica: str = "r0", boot: int = 1, **changes: object) -> Sent:
    return Sent(seq, replica, boot, 100, 50.0, 120, 7, **changes)  # type: ignore[arg-type]


def test_a_report_that_came_before_the_message_counts_too() -> None:
    peers = Peers(set())
    peers.hear("b", 5, 1, PeerState((sent(3), sent(4))), 0.0)
    peers.note_seen("r0", {"b-5": 3, "b-4": 99})
    assert peers.booked("r0").unseen_requests == 1


def test_what_is_sent_changes_the_choice_of_the_others() -> None:
    world = World(replicas=2)
    first = world.decide(prompt((1, 4)))
    other = World(replicas=2, seed=7)
    away = sent(1, first.replica)
    other.brain.peers.hear("b", 1, 1, PeerState((away,)), other.clock())
    assert other.decide(prompt((2, 4))).replica != first.replica
    other.brain.peers.hear("b", 1, 2, PeerDelta(ended=(1,)), other.clock())
    assert other.brain.peers.booked(first.replica) == Booked()


def test_a_newer_life_fences_the_former_one() -> None:
    peers = Peers(set())
    peers.hear("b", 5, 9, PeerState((sent(1),)), 0.0)
    assert not peers.hear("b", 6, 1, PeerDelta((sent(1), sent(2))), 0.0)
    peers.hear("b", 5, 10, PeerState((sent(7),)), 0.0)
    assert peers.open == 2
    assert peers.hear("b", 6, 2, PeerState(), 0.0)
    assert peers.booked("r0") == Booked()


def test_E12_the_silent_count_for_nothing_and_the_many_are_bounded() -> None:
    changed: set[str] = set()
    peers = Peers(changed)
    for number in range(100):
        peers.hear(f"b{number}", 1, 1, PeerState((sent(1),)), float(number == 5))
    assert len(peers) < 100
    changed.clear()
    peers.expire(GONE_S + 0.5)
    assert [view.router for view in peers.views(GONE_S)] == ["b5"]
    assert changed == {"r0"}
    peers.hear("b5", 1, 2, PeerState(tuple(sent(n) for n in range(MAX_OPEN + 9))), 2.0)
    assert peers.open == MAX_OPEN


def test_nonsense_on_the_bus_is_counted_and_harms_nobody() -> None:
    router = Router("a", 1, Clock(), {"r0": 1})
    router.listen()
    router.hear("b", b"\xff")
    router.hear("b", seal("c", 1, 0, 1, PeerState((sent(1),))))
    router.hear("b", seal("b", 1, 0, 1, load()))
    assert router.sync.malformed == 3
    assert router.world.brain.peers.open == 0


def test_E8_what_went_to_a_former_life_of_a_replica_does_not_count() -> None:
    router = Router("a", 1, Clock(), {"r0": 5})
    router.listen()
    fleet, peers = router.world.fleet, router.world.brain.peers
    router.hear("b", seal("b", 1, 0, 1, PeerState((sent(1, boot=4), sent(2, boot=5)))))
    assert peers.open == 1
    foreign = hello(engine="openai", link_url="http://127.0.0.1:9")
    fleet.on_hello("v0", 3, foreign)
    router.hear("b", seal("b", 1, 0, 2, PeerState((sent(3, "v0", boot=1),))))
    assert peers.booked("v0").unseen_requests == 1


def test_what_a_tenant_uses_at_one_router_goes_off_its_limit_at_all() -> None:
    clock = Clock()
    one, other = Router("a", 1, clock, {"r0": 1}), Router("b", 1, clock, {"r0": 1})
    for router, peer in ((one, other), (other, one)):
        router.listen()
        router.hear(peer.name, seal(peer.name, 1, 0, 0, PeerAsk()))

    def left(router: Router) -> int:
        return int(router.acme.headers()["x-ratelimit-remaining-requests"])

    for _ in range(20):
        with one.acme.request():
            pass
    asyncio.run(one.sync.tick())
    said = [data for data in one.wire.out for _ in range(2)]
    one.wire.out.clear()
    assert all(b"acme" not in data for data in said)
    for data in said:
        other.hear("a", data)
    assert (left(one), left(other)) == (40, 40)
    clock.pass_s(5.0)
    assert (left(one), left(other)) == (45, 45)
    asyncio.run(other.sync.tick())
    for data in other.wire.out:
        one.hear("b", data)
    assert left(one) == 45


def test_a_tenant_has_no_more_at_once_over_all_routers_than_at_one() -> None:
    clock = Clock()
    one, other = Router("a", 1, clock, {"r0": 1}), Router("b", 1, clock, {"r0": 1})
    changed = TenantConfig(name="acme", max_concurrent=3)
    for router, peer in ((one, other), (other, one)):
        router.listen()
        router.hear(peer.name, seal(peer.name, 1, 0, 0, PeerAsk()))
        router.tenants.take(changed)
        router.limits.account(router.tenants.named("acme"))
    one.acme.request()
    one.acme.request()
    asyncio.run(one.sync.tick())
    assert all(b"acme" not in data for data in one.wire.out)
    for data in one.wire.out:
        other.hear("a", data)
    other.acme.request()
    with pytest.raises(UserError) as caught:
        other.acme.request()
    assert caught.value.error.status == 429
    clock.pass_s(GONE_S + 1)
    asyncio.run(other.sync.tick())
    other.acme.request()


def test_two_lives_under_one_id_raise_an_alarm_while_both_speak() -> None:
    clock = Clock()
    router = Router("a", 7, clock, {"r0": 1})
    router.listen()
    alarms = router.world.fleet.alarms
    router.hear("a", seal("a", 7, 0, 1, PeerState()))
    asyncio.run(router.sync.tick())
    assert not alarms.active("router_id_taken", "a")
    router.hear("a", seal("a", 3, 0, 1, PeerState()))
    asyncio.run(router.sync.tick())
    assert alarms.active("router_id_taken", "a")
    clock.pass_s(GONE_S + 1)
    asyncio.run(router.sync.tick())
    assert not alarms.active("router_id_taken", "a")


def test_siblings_of_a_cold_prefix_meet_although_they_come_over_two_routers() -> None:
    """A head of 40 blocks; the tails differ. Without marks the idle replicas would tempt."""
    for seed in range(8):
        world, other = World(replicas=8, seed=seed), World(replicas=8, seed=100 + seed)
        head, placed = (seed, 40), world.decide(prompt((seed, 40), (500, 3)))
        marks = marks_of(prompt(head, (500, 3)), 0)
        other.brain.peers.hear(
            "b", 1, 1, PeerDelta((sent(1, placed.replica, marks=marks),)), other.clock()
        )
        sibling = other.decide(prompt(head, (501, 3)))
        assert sibling.replica == placed.replica
        assert sibling.predicted_cached_tokens >= 32 * 16
        assert other.decide(prompt((900 + seed, 43))).predicted_cached_tokens == 0


def test_marks_vouch_for_what_is_shared_to_the_step_and_never_for_more() -> None:
    for known, shared, more in [(0, 200, 3), (0, 5, 9), (100, 120, 0), (150, 300, 7), (63, 64, 1)]:
        sent_chain = prompt((1, shared), (2, more)) if more else prompt((1, shared))
        asked = prompt((1, shared), (3, 11))
        marks = Marks()
        marks.add("r0", marks_of(sent_chain, known), 10.0)
        replica, depth = marks.deepest(asked, known, 9.0)
        assert replica == "r0"
        assert shared - STEP_BLOCKS < depth <= shared


def test_marks_end_by_time_by_number_and_with_their_replica() -> None:
    keys = prompt((1, 20))
    marks = Marks(limit=8)
    marks.add("r0", marks_of(keys, 0), 10.0)
    assert marks.deepest(keys, 0, 9.0) == ("r0", 16)
    assert marks.deepest(keys, 0, 10.0) is None
    assert marks.deepest(prompt((9, 20)), 0, 9.0) is None
    marks.add("r1", marks_of(keys, 11), 20.0)
    assert marks.deepest(keys, 0, 9.0) == ("r1", 16)
    marks.expire(10.0)
    assert len(marks) == 2
    marks.forget_replica("r1")
    assert len(marks) == 0
    for seed in range(9):
        marks.add("r0", marks_of(prompt((seed, 20)), 0), 10.0)
    assert len(marks) <= 8
    assert marks_of(keys, 20) == b""


def test_marks_that_would_make_a_message_too_long_stay_at_home() -> None:
    router = Router("a", 1, Clock(), {"r0": 1})
    router.listen()
    router.hear("b", seal("b", 1, 0, 1, PeerState()))
    for seed in range(2):
        router.world.decide(prompt((seed, 900)), pin="r0")
    delta = router.sync._delta((), ())
    assert all(one.marks for one in delta.sent)
    assert len(encode(delta)) < 8_192
    for one in router.sync._changes.sent.values():
        one.marks = bytes(MAX_MARKS_BYTES)
    assert not any(one.marks for one in router.sync._delta((), ()).sent)
