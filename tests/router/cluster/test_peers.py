"""What routers tell each other: sums, fences between lives, bounds, tenants' limits over all."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from contextlib import ExitStack

import pytest

from configs.schema import TenantConfig
from events.envelope import seal
from events.errors import UserError
from events.peer import PeerAsk, PeerDelta, PeerState, Used
from router.choice.reserve import Booked
from router.cluster.peers import GONE_S, MAX_OPEN, Peers
from router.cluster.sync import STATE_S
from router.tenancy.tenants import TenantChange
from router.waiting.fair import QUANTUM_TOKENS, Entry, FairQueue
from tests.router.cluster.rig import Router, sent
from tests.router.kit import Clock, World, hello, inside, load, prompt
from tests.router.waiting.fleet import job_of


def test_a_report_that_came_before_the_message_counts_too() -> None:
    peers = Peers()
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
    peers = Peers()
    peers.hear("b", 5, 9, PeerState((sent(1),)), 0.0)
    assert not peers.hear("b", 6, 1, PeerDelta((sent(1), sent(2))), 0.0)
    peers.hear("b", 5, 10, PeerState((sent(7),)), 0.0)
    assert peers.open == 2
    assert peers.hear("b", 6, 2, PeerState(), 0.0)
    assert peers.booked("r0") == Booked()


def test_E12_the_silent_count_for_nothing_and_the_many_are_bounded() -> None:
    peers = Peers()
    for number in range(100):
        peers.hear(f"b{number}", 1, 1, PeerState((sent(1),)), float(number == 5))
    assert len(peers) < 100
    peers.changed.clear()
    peers.expire(GONE_S + 0.5)
    assert [view.router for view in peers.views(GONE_S)] == ["b5"]
    assert peers.changed == {"r0"}
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
        with inside(one.acme):
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


def test_S6_what_is_computed_for_a_tenant_at_one_router_goes_off_its_turns_at_all() -> None:
    clock = Clock()
    one, other = Router("a", 1, clock, {"r0": 1}), Router("b", 1, clock, {"r0": 1})
    for router, peer in ((one, other), (other, one)):
        router.listen()
        router.hear(peer.name, seal(peer.name, 1, 0, 0, PeerAsk()))
    waiting = other.queue._pools["p"] = FairQueue()
    for tenant in ("acme", "anonymous") * 9:
        waiting.add(Entry(tenant, 1.0, 0, 1, lambda: QUANTUM_TOKENS, QUANTUM_TOKENS))
    job = job_of(one.tenants.named("acme"), prompt((1, 256)), 64)
    one.queue.placed(job, one.world.decide(job.chain))
    asyncio.run(one.sync.tick())
    assert all(b"acme" not in data for data in one.wire.out)
    for data in [data for data in one.wire.out for _ in range(2)]:
        other.hear("a", data)
    assert Counter(waiting.pop().tenant for _ in range(9))["anonymous"] >= 8


def test_a_tenant_has_no_more_at_once_over_all_routers_than_at_one() -> None:
    clock = Clock()
    one, other = Router("a", 1, clock, {"r0": 1}), Router("b", 1, clock, {"r0": 1})
    changed = TenantConfig(name="acme", max_concurrent=3)
    for router, peer in ((one, other), (other, one)):
        router.listen()
        router.hear(peer.name, seal(peer.name, 1, 0, 0, PeerAsk()))
        router.tenants.take(changed)
        router.limits.account(router.tenants.named("acme"))
    one.acme.enter()
    one.acme.enter()
    asyncio.run(one.sync.tick())
    assert all(b"acme" not in data for data in one.wire.out)
    for data in one.wire.out:
        other.hear("a", data)
    other.acme.enter()
    with pytest.raises(UserError) as caught:
        other.acme.enter()
    assert caught.value.error.status == 429
    clock.pass_s(GONE_S + 1)
    asyncio.run(other.sync.tick())
    other.acme.enter()


def test_what_one_router_has_on_its_way_to_be_answered_leaves_no_room_at_the_others() -> None:
    clock = Clock()
    one, other = Router("a", 1, clock, {"r0": 1}), Router("b", 1, clock, {"r0": 1})
    for router, peer in ((one, other), (other, one)):
        router.listen()
        router.hear(peer.name, seal(peer.name, 1, 0, 0, PeerAsk()))
    member = other.world.fleet.member("r0")
    limit, blocks = other.quota.limit(member), member.load.free_blocks // 2

    def carry() -> None:
        asyncio.run(one.sync.tick())
        for data in one.wire.out:
            other.hear("a", data)
        one.wire.out.clear()

    carry()
    with one.quota.pledge("r0", blocks + 1):
        carry()
        assert other.quota.pledged("r0") == 1
        assert not other.quota.has_room(member, blocks)
        assert other.quota.has_room(member, blocks - 1)
    with ExitStack() as pledges:
        for _ in range(limit):
            assert other.quota.has_room(member, 1)
            pledges.enter_context(one.quota.pledge("r0", 1))
            carry()
        assert not other.quota.has_room(member, 1)
        # What the bus lost the next whole state mends; of the silent nothing counts.
        pledges.pop_all().close()
        asyncio.run(one.sync.tick())
        one.wire.out.clear()
        assert not other.quota.has_room(member, 1)
        clock.pass_s(STATE_S)
        carry()
        assert other.quota.has_room(member, 1)
    with one.quota.pledge("r0", 1):
        carry()
        clock.pass_s(GONE_S + 1)
        asyncio.run(other.sync.tick())
        assert other.quota.pledged("r0") == 0


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


def test_unknown_tenants_cost_no_look_at_all_that_are_known() -> None:
    router = Router("a", 1, Clock(), {"r0": 1})
    listed, looks = router.tenants.listed, []
    router.tenants.listed = lambda: looks.append(1) or listed()  # type: ignore[method-assign]
    flood = [Used(number.to_bytes(8), 1, 1, 1) for number in range(200)]
    router.use.hear(flood)
    assert len(looks) <= 1
    other = Router("b", 1, Clock(), {"r0": 1})
    for of in (router, other):
        of.tenants.put("late", TenantChange(key="late-key-1", policy={"requests_per_min": 2}))
    other.use.spent("late", 2, 0)
    router.use.hear(other.use.take())
    with pytest.raises(UserError):
        router.limits.account(router.tenants.named("late")).enter()
    assert len(looks) == 2


@pytest.mark.parametrize("routers", [2, 3])
@pytest.mark.parametrize("delay", [0, 1, 4, 9, 20])
@pytest.mark.parametrize("seed", [1, 2])
def test_R1_a_burst_overloads_nobody_by_more_than_what_came_within_one_sync_delay(
    routers: int, delay: int, seed: int
) -> None:
    """Arrivals at random routers; what each says reaches the others `delay` arrivals later."""
    rng, clock, replicas = random.Random(seed), Clock(), [f"r{number}" for number in range(8)]
    boots = dict.fromkeys(replicas, 1)
    all_of = [Router(f"q{n}", 1, clock, boots) for n in range(routers)]
    for router in all_of:
        router.listen()
        for peer in all_of:
            if peer is not router:
                router.hear(peer.name, seal(peer.name, 1, 0, 0, PeerAsk()))
        asyncio.run(router.sync.tick())
        router.wire.out.clear()
    placed: Counter[str] = Counter()
    on_the_way: deque[list[tuple[str, bytes]]] = deque()
    for number in range(1, 97):
        decision = rng.choice(all_of).world.decide(prompt((number, 8)))
        placed[decision.replica] += 1
        on_the_way.append([])
        for router in all_of:
            asyncio.run(router.sync.tick())
            on_the_way[-1] += [(router.name, data) for data in router.wire.out]
            router.wire.out.clear()
        if len(on_the_way) > delay:
            for sender, data in on_the_way.popleft():
                for router in all_of:
                    if router.name != sender:
                        router.hear(sender, data)
        fair = -(-number // len(replicas))
        assert max(placed.values()) - fair <= delay, (number, placed)


def test_E9_after_a_gap_only_a_whole_state_is_believed_to_be_all() -> None:
    router = Router("a", 1, Clock(), {"r0": 1})
    router.listen()
    peers = router.world.brain.peers

    def whole() -> bool:
        (view,) = peers.views(0.0)
        return view.whole

    router.hear("b", seal("b", 1, 0, 1, PeerState()))
    assert whole()
    router.wire.gap("reconnect")
    router.hear("b", seal("b", 1, 0, 2, PeerDelta(sent=(sent(1),))))
    assert not whole()
    router.hear("b", seal("b", 1, 0, 3, PeerState((sent(1),))))
    assert whole()


def test_E1_one_lost_message_is_asked_after_once() -> None:
    clock = Clock()
    router = Router("a", 1, clock, {"r0": 1})
    router.listen()

    def asks() -> int:
        asyncio.run(router.sync.tick())
        said, router.wire.out = router.wire.out, []
        return said.count(seal("a", 1, 0, router.sync._seq, PeerAsk()))

    asks()
    clock.pass_s(1.0)
    router.hear("b", seal("b", 1, 0, 1, PeerState()))
    router.hear("b", seal("b", 1, 0, 2, PeerDelta(sent=(sent(1),))))
    assert asks() == 0
    router.hear("b", seal("b", 1, 0, 4, PeerDelta(sent=(sent(3),))))
    assert asks() == 1
    router.hear("b", seal("b", 1, 0, 5, PeerState((sent(1), sent(2), sent(3)))))
    clock.pass_s(1.0)
    router.hear("b", seal("b", 1, 0, 6, PeerDelta(ended=(1,))))
    assert asks() == 0
    assert router.world.brain.peers.open == 2
