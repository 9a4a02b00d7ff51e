"""Shared reservations: whatever is lost, doubled, late or restarted, the sums end up true."""

from __future__ import annotations

import asyncio
import random
from contextlib import AbstractContextManager, suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from events.decision import RouteDecision
from events.errors import UserError
from events.peer import Pledged
from router.choice.reserve import Booked
from router.cluster.sync import STATE_S
from router.tenancy.others import NOTHING
from tests.router.cluster.rig import Router
from tests.router.kit import Clock, load, prompt

REPLICAS = ("r0", "r1", "r2")


ROUTERS = ("a", "b", "c")


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
        self.pledges: dict[Router, list[tuple[str, AbstractContextManager[None]]]] = {}
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
            router.acme.enter()

    @precondition(lambda self: any(router.acme.inside for router in self.live.values()))
    @rule(name=routers)
    def tenant_leaves(self, name: str) -> None:
        if self.live[name].acme.inside:
            self.live[name].acme.leave()

    @rule(name=routers, replica=replicas, blocks=st.integers(1, 6))
    def pledge(self, name: str, replica: str, blocks: int) -> None:
        router = self.live[name]
        entered = router.quota.pledge(replica, blocks)
        entered.__enter__()
        self.pledges.setdefault(router, []).append((replica, entered))

    @rule(name=routers, pick=picks)
    def arrives(self, name: str, pick: int) -> None:
        if held := self.pledges.get(self.live[name]):
            held.pop(pick % len(held))[1].__exit__(None, None, None)

    def others_pledged(self, name: str, replica: str) -> int:
        others = [router for router in self.live.values() if router.name != name]
        return sum(to == replica for of in others for to, _ in self.pledges.get(of, ()))

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
                told = router.world.brain.peers.pledged(replica).requests
                assert told == self.others_pledged(name, replica)
        for router in self.live.values():
            for _, entered in self.pledges.get(router, ()):
                entered.__exit__(None, None, None)
            while router.acme.inside:
                router.acme.leave()
            for decision in router.open.values():
                router.world.end(decision, "client_gone")
        self.heal()
        for router in self.live.values():
            assert router.world.brain.peers.open == 0
            assert router.use.elsewhere("acme") == NOTHING
            for replica in REPLICAS:
                assert router.world.brain.peers.booked(replica) == Booked()
                assert router.world.brain.peers.pledged(replica) == Pledged(replica)


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
