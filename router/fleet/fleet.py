"""The replicas that this router knows: who they are, what they hold, how they do.

Owns membership, pools by fingerprint, the digest index and the alarms. Built only from what the
feed, the links and finished requests tell; every message of an older life is ignored, a larger
boot replaces everything at once. Must not know policies or requests.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from events.load import OWN_ENGINE, DigestShape, ReplicaHello, ReplicaLoad
from kvstore.identity import KeyChain
from router.fleet.digests import Digests
from router.fleet.evidence import Evidence
from router.fleet.expected import Expectations, Expected, pool_name
from router.fleet.fits import PoolPrior
from router.fleet.member import Member
from router.fleet.pool import Pool, grouped, leaders
from router.fleet.trust import Prediction
from router.fleet.view import ReplicaView, view_of
from router.locality.below import BelowIndex
from router.locality.falsehits import FalseHits
from router.locality.index import DigestIndex
from router.telemetry.alarms import Alarms, Clock

MAX_REPLICAS = 4_096
CHECK_EVERY_S = 0.5
SILENCE = "silent"
"""The feed's reason for a replica that just isn't heard any more."""

FenceListener = Callable[[str], None]
"""Called with the replica's id when its current life is over."""

ChangeListener = Callable[[str], None]
"""Called with the replica's id when something about it may have changed."""


class Fleet:
    """Implements events.feed.FeedListener. Everything runs on the event loop.

    `roster_version` changes whenever a pool gets another member, or loses one."""

    def __init__(
        self, expected: Expected | Expectations, clock: Clock, index: DigestIndex | None = None
    ) -> None:
        self.alarms = Alarms(clock)
        self.roster_version = 0
        self.index = index if index is not None else DigestIndex()
        self.below = BelowIndex()
        self._evidence = Evidence(self.index, self.alarms)
        self._digests = Digests(
            self.index, self.below, self.alarms, self._evidence.false_hits, clock
        )
        if isinstance(expected, Expected):
            expected = Expectations(expected)
        self._expected = expected
        self._clock = clock
        self._pools: dict[str, Pool] | None = None
        self._members: dict[str, Member] = {}
        self._link_boots: dict[str, int] = {}
        self._priors: dict[str, PoolPrior] = {}
        self._listeners: list[FenceListener] = []
        self._watchers: list[ChangeListener] = []
        self._next_check_s = 0.0

    # What the feed tells

    def on_hello(self, replica: str, boot: int, hello: ReplicaHello) -> None:
        """A new life, or the same one again."""
        known = self._members.get(replica)
        if known is None and len(self._members) >= MAX_REPLICAS:
            self.alarms.raise_("fleet_full", replica, f"more than {MAX_REPLICAS} replicas")
        elif known is None or boot > known.boot:
            self._begin_life(replica, boot, hello)
        elif boot == known.boot:
            known.silent = False
            if hello != known.hello:
                self._admit(known, hello)

    def on_load(self, replica: str, boot: int, load: ReplicaLoad) -> None:
        """A heartbeat; it also tells whether the digest here is the newest."""
        member = self._current(replica, boot)
        if member is None:
            return
        now_s = self._clock()
        after_s = now_s - member.load_at_s
        member.load, member.load_at_s, member.silent = load, now_s, False
        if not member.misfits:
            prior = self._priors[member.pool]
            prior.learn(load)
            member.prefill, member.decode = prior.fits(load)
            member.usage.learn(load, member.prefill.b, after_s)
        if member.digest_cursor == (load.digest_generation, load.digest_seq):
            member.digest_at_s = now_s
        self.check()
        self._evidence.probe(now_s)

    def on_digest_reset(
        self,
        replica: str,
        boot: int,
        generation: int,
        seq: int,
        shape: DigestShape,
        bits: np.ndarray,
    ) -> None:
        """A whole digest."""
        member = self._current(replica, boot)
        if member is not None and not member.misfits:
            self._digests.reset(member, (generation, seq), shape, bits)
            self._evidence.look(member)

    def on_digest_delta(
        self,
        replica: str,
        boot: int,
        seq: int,
        set_positions: np.ndarray,
        clear_positions: np.ndarray,
    ) -> None:
        """Changes of a known digest; without one they mean nothing and are ignored."""
        member = self._current(replica, boot)
        if member is not None and member.digest_cursor is not None:
            self._digests.apply(member, seq, set_positions, clear_positions)
            self._evidence.look(member)

    def on_digest_unknown(self, replica: str, boot: int, reason: str) -> None:
        """A gap: the replica is routed by load until its digest is whole again."""
        member = self._current(replica, boot)
        if member is not None:
            self._digests.forget(member)

    def on_gone(self, replica: str, boot: int, reason: str) -> None:
        """Bye, silence or a fence. Where only the bus is silent and the link still stands, the
        replica stays, without locality, until the link breaks too."""
        member = self._current(replica, boot)
        if member is None:
            return
        if reason == SILENCE and member.linked:
            member.silent = True
            self._digests.forget(member)
        else:
            self._drop(member)

    # What links and requests tell

    def link_state(self, replica: str, boot: int, up: bool) -> None:
        """The link to one life of a replica went up or down. It is remembered beyond the member: a
        replica that comes back while its link stands is told of only once."""
        if up:
            self._link_boots[replica] = boot
        elif self._link_boots.get(replica) == boot:
            del self._link_boots[replica]
        else:
            return
        member = self._members.get(replica)
        if member is None:
            return
        self._touch(replica)
        member.link_boot = boot if up else None
        self._pools = None
        if not up and member.silent:
            self._drop(member)

    def link_stalled(self, replica: str, boot: int, stalled: bool) -> None:
        """The link to one life of a replica stands, but nothing comes."""
        if self._current(replica, boot) is not None:
            self.alarms.set(
                stalled, "replica_stalled", replica, "says nothing: stopped or overloaded"
            )

    def replica_failed(self, replica: str, boot: int) -> None:
        """A request failed by the replica's own fault: transport, timeout, 5xx."""
        member = self._current(replica, boot)
        if member is not None:
            member.breaker.failure(self._clock())

    def replica_hangs(self, replica: str, boot: int) -> None:
        """It has requests, and says nothing of any."""
        member = self._current(replica, boot)
        if member is not None:
            member.breaker.trip(self._clock())

    def on_trial(self, member: Member, now_s: float) -> None:
        """A request is being sent there although its breaker is not closed."""
        member.breaker.begin(now_s)
        self._touch(member.replica)

    def replica_alive(
        self, replica: str, boot: int, chain: KeyChain, public_cut_blocks: int = 0
    ) -> None:
        """A request got its first token: its prompt was just computed there, so that its head must
        show in the digest before long."""
        member = self._members.get(replica)
        if member is None or member.boot != boot:
            return
        if member.proof is None:
            self._evidence.expect_shown(member, chain, public_cut_blocks, self._clock())
        if not member.breaker.closed:
            member.breaker.alive(self._clock())
            self._touch(replica)

    def replica_served(self, replica: str, boot: int) -> None:
        """A request was served to its end."""
        member = self._members.get(replica)
        if member is not None and member.boot == boot and member.breaker.success():
            self._touch(replica)

    def replica_undecided(self, replica: str, boot: int) -> None:
        """A request ended in a way that says nothing about the replica."""
        member = self._members.get(replica)
        if member is not None and member.boot == boot and not member.breaker.closed:
            member.breaker.undecided()
            self._touch(replica)

    def observe(
        self,
        replica: str,
        boot: int,
        predicted: Prediction,
        cached_tokens: int,
        ttft_ms: float,
    ) -> None:
        """Prediction meets reality. Only what changed is told: most of it comes true."""
        member = self._members.get(replica)
        if member is None or member.boot != boot:
            return
        trust = member.trust
        believed, doubted = trust.value, trust.false_hits
        trust.observe(predicted, cached_tokens, ttft_ms)
        if predicted.fetched:
            trust.fetches.observe(predicted.fetched, cached_tokens, ttft_ms, self._clock())
        if trust.value != believed or predicted.fetched:
            self._touch(replica)
        if trust.false_hits or doubted:
            self.alarms.set(trust.false_hits, "false_hits", replica, f"trust {trust.value:.2f}")

    def on_fence(self, listener: FenceListener) -> None:
        """Register for the end of lives."""
        self._listeners.append(listener)

    def on_change(self, listener: ChangeListener) -> None:
        """Register for changes of single replicas; those of the roster are told by its version."""
        self._watchers.append(listener)

    # What others ask

    def members(self, pool: str) -> list[Member]:
        """Everybody of a pool, by id, refused ones included."""
        return sorted(
            (member for member in self._members.values() if member.pool == pool),
            key=lambda member: member.replica,
        )

    def member(self, replica: str) -> Member | None:
        """One replica."""
        return self._members.get(replica)

    def __len__(self) -> int:
        return len(self._members)

    def pools(self) -> dict[str, Pool]:
        """Pools with at least one fitting replica, the one with most linked replicas first."""
        if self._pools is None:
            self._pools = grouped(self._members.values())
        return self._pools

    def others_serve(self, replica: str) -> bool:
        """Whether requests could go to somebody else of its pool now."""
        now_s, member = self._clock(), self._members.get(replica)
        return member is not None and any(
            other is not member and other.unavailable(now_s) is None
            for other in self.members(member.pool)
        )

    @property
    def false_hits(self) -> FalseHits:
        """How often each digest claims what nobody holds."""
        return self._evidence.false_hits

    @property
    def warm(self) -> bool:
        """Whether every replica that tells what it holds is linked, and known whole."""
        return all(
            member.linked and self.index.known(member.replica)
            for member in self._members.values()
            if member.hello.digests and not member.misfits
        )

    def lacking(self, ability: str) -> frozenset[str]:
        """Replicas that don't have it."""
        members = self._members.values()
        return frozenset(m.replica for m in members if ability not in m.hello.abilities)

    def targets(self) -> dict[str, tuple[int, str]]:
        """(boot, link url) of each replica of our own that fits: whom to dial."""
        return {
            member.replica: (member.boot, member.hello.link_url)
            for member in self._members.values()
            if not member.misfits and member.hello.engine == OWN_ENGINE
        }

    def replicas(self) -> list[ReplicaView]:
        """Everybody, for people to look at."""
        now_s = self._clock()
        members = sorted(self._members.values(), key=lambda member: member.replica)
        return [
            view_of(member, now_s, self.index, self._digests, self.false_hits) for member in members
        ]

    def check(self) -> None:
        """Raise and clear the alarms that come with time. Cheap: called with every heartbeat and
        every decision, does its work twice a second."""
        now_s = self._clock()
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + CHECK_EVERY_S
        leading = leaders(self.pools())
        self._evidence.listen(self._members.values(), now_s)
        for member in self._members.values():
            heard = member.breaker.closed or not member.unheard(now_s)
            if heard and member.breaker.fade(now_s):
                self._touch(member.replica)
            if not member.misfits:
                self._evidence.check(member, now_s, leading)

    # Inside

    def _current(self, replica: str, boot: int) -> Member | None:
        member = self._members.get(replica)
        if member is None or member.boot != boot:
            return None
        self._touch(replica)
        return member

    def _touch(self, replica: str) -> None:
        for watcher in self._watchers:
            watcher(replica)

    def _begin_life(self, replica: str, boot: int, hello: ReplicaHello) -> None:
        if replica in self._members:
            self._end_life(replica)
        member = Member(replica, boot, hello, pool_name(hello), self._clock())
        member.link_boot = self._link_boots.get(replica)
        self._members[replica] = member
        self._pools = None
        self.roster_version += 1
        self._admit(member, hello)

    def _admit(self, member: Member, hello: ReplicaHello) -> None:
        """Take in what the hello says; refuse the replica when it doesn't fit."""
        self._touch(member.replica)
        pool = pool_name(hello)
        if pool != member.pool or hello.role != member.hello.role:
            self.roster_version += 1
        if pool != member.pool:
            self._digests.forget(member)
            self._digests.remove(member.replica)
        if hello != member.hello:
            self._pools = None
        if (hello.tiers, hello.peers) != (member.hello.tiers, member.hello.peers):
            self.roster_version += 1
        member.hello, member.pool = hello, pool
        for name in set(member.misfits):
            self.alarms.clear(name, member.replica)
        member.revision, member.misfits = self._expected.judge(hello)
        for name, reason in member.misfits.items():
            self.alarms.raise_(name, member.replica, f"refused: {reason}")
        self._judge_adapters(member)
        if not member.misfits:
            prior = self._priors.setdefault(pool, PoolPrior(hello.device))
            member.prefill, member.decode = prior.fits(member.load)

    def _judge_adapters(self, member: Member) -> None:
        """Alarms for those that nobody is sent there for, each by its name."""
        strange = self._expected.of(member.revision).strangers(member.hello)
        failing = [note.name for note in member.hello.adapters if note.failing]
        for alarm, names, what in (
            ("adapter_mismatch", strange, "another content than this router's"),
            ("adapter_failing", failing, "could not be loaded"),
        ):
            detail = f"{what}: {', '.join(sorted(names))}"
            self.alarms.set(bool(names) and not member.misfits, alarm, member.replica, detail)

    def _drop(self, member: Member) -> None:
        self._end_life(member.replica)
        del self._members[member.replica]
        self._pools = None
        self.roster_version += 1
        if all(other.pool != member.pool for other in self._members.values()):
            self._priors.pop(member.pool, None)

    def _end_life(self, replica: str) -> None:
        self._digests.remove(replica)
        self.alarms.forget(replica)
        for listener in self._listeners:
            listener(replica)
