"""What a reader of the bus learns about replicas, in an order that can be trusted.

`FeedListener` is the narrow side that fleet and index implement: whatever happens on the wire
(loss, duplication, reordering, restarts), its methods are called so that the state built from them
is either right or known to be unknown.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from events.bus import Bus, Subscription
from events.cursor import Cursor, Verdict
from events.digest import DigestDelta, check_shape
from events.envelope import MAX_BUS_MESSAGE_BYTES, Envelope, unseal
from events.errors import WireError
from events.load import DigestShape, ReplicaBye, ReplicaHello, ReplicaLoad
from events.resync import Backoff, fetch_snapshot
from events.snapshot import FrozenDigest
from events.subjects import replica_subject, roll_call_subject, split
from events.wire import decode

log = logging.getLogger(__name__)

SWEEP_S = 0.1
ROLL_CALL_WAIT_S = 1.0
MAX_REPAIRS_AT_ONCE = 16
MAX_REASON_CHARS = 64

_hellos = msgspec.msgpack.Decoder(ReplicaHello)
_loads = msgspec.msgpack.Decoder(ReplicaLoad)
_deltas = msgspec.msgpack.Decoder(DigestDelta)
_byes = msgspec.msgpack.Decoder(ReplicaBye)


class FeedListener(Protocol):
    """Called on the event loop; must not block. A larger `boot` fences everything older at once."""

    def on_hello(self, replica: str, boot: int, hello: ReplicaHello) -> None:
        """First sight of a replica's life, or its repeated hello."""

    def on_load(self, replica: str, boot: int, load: ReplicaLoad) -> None:
        """A heartbeat of the current life."""

    def on_digest_reset(
        self,
        replica: str,
        boot: int,
        generation: int,
        seq: int,
        shape: DigestShape,
        bits: np.ndarray,
    ) -> None:
        """The whole digest: `bits` is uint8 of shape (shape.total_bits // 8,), little bit order."""

    def on_digest_delta(
        self,
        replica: str,
        boot: int,
        seq: int,
        set_positions: np.ndarray,
        clear_positions: np.ndarray,
    ) -> None:
        """Positions (uint32) that became set or clear; always follows the state before it."""

    def on_digest_unknown(self, replica: str, boot: int, reason: str) -> None:
        """A gap: forget the replica's locality, keep routing to it by load. A reset will follow."""

    def on_gone(self, replica: str, boot: int, reason: str) -> None:
        """Bye, or silence beyond the bound, or fenced by a larger boot."""


@dataclass(slots=True)
class FeedStats:
    """Counters since the start."""

    malformed: int = 0
    old: int = 0
    deltas: int = 0
    gaps: int = 0
    repairs: int = 0
    repairs_failed: int = 0
    fenced: int = 0
    refused: int = 0
    roll_calls: int = 0


@dataclass(frozen=True, slots=True)
class FeedState:
    """What the feed knows of one replica now."""

    boot: int
    present: bool
    digest_known: bool
    generation: int
    seq: int


@dataclass(slots=True)
class _Life:
    """One boot of one replica. `present` between hello and gone; `left` after its bye."""

    replica: str
    boot: int
    heard_s: float
    backoff: Backoff
    cursor: Cursor = field(default_factory=Cursor)
    present: bool = False
    left: bool = False
    silent: bool = False
    behind_since_s: float | None = None
    repair: asyncio.Task[None] | None = None


class Feed:
    """Turns the bus's messages into calls of one listener. `sweep` is what time drives."""

    def __init__(
        self,
        bus: Bus,
        cluster: str,
        listener: FeedListener,
        clock: Callable[[], float] = time.monotonic,
        *,
        stale_s: float = 2.5,
        gone_s: float = 6.0,
        forget_s: float = 60.0,
        behind_s: float = 0.15,
        max_replicas: int = 1_024,
        rng: random.Random | None = None,
    ) -> None:
        """Silence: after `stale_s` the digest is unknown, after `gone_s` the replica is gone, after
        `forget_s` any boot of it is welcome again. `behind_s`: how long a heartbeat may name a
        delta that has not arrived."""
        self.stats = FeedStats()
        self._bus = bus
        self._cluster = cluster
        self._listener = listener
        self._clock = clock
        self._stale_s, self._gone_s, self._forget_s = stale_s, gone_s, forget_s
        self._behind_s = behind_s
        self._max_replicas = max_replicas
        self._rng = rng or random.Random()
        self._lives: dict[str, _Life] = {}
        self._repairs = asyncio.Semaphore(MAX_REPAIRS_AT_ONCE)
        self._subscription: Subscription | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._roll_call_wanted = False
        self._next_roll_call_s = 0.0

    async def start(self) -> None:
        """Subscribe, then ask who is there."""
        # One subscription for all kinds: what a replica says stays in the order it said it.
        self._subscription = await self._bus.subscribe(
            replica_subject(self._cluster, "*", "*"), self._receive
        )
        self._bus.on_gap(self._on_gap)
        self._roll_call_wanted = True
        await self._call_roll()
        self._sweeper = asyncio.create_task(self._sweep_for_ever())

    async def close(self) -> None:
        """Stop listening; the listener hears nothing more. Idempotent."""
        if self._subscription is not None:
            await self._subscription.close()
        tasks = [life.repair for life in self._lives.values() if life.repair is not None]
        tasks += [self._sweeper] if self._sweeper is not None else []
        self._lives.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def states(self) -> dict[str, FeedState]:
        """By replica id, those gone but not yet forgotten included."""
        return {
            life.replica: FeedState(
                life.boot,
                life.present,
                life.cursor.known,
                life.cursor.generation,
                life.cursor.seq,
            )
            for life in self._lives.values()
        }

    async def sweep(self) -> None:
        """What is due by time alone: silence, deltas that never came, repairs, roll calls."""
        now_s = self._clock()
        for life in list(self._lives.values()):
            if not self._bus.connected:
                # Our own deafness is no proof of anybody's death.
                life.heard_s = max(life.heard_s, now_s - (self._stale_s + self._gone_s) / 2)
            self._age(life, now_s)
            self._repair_if_due(life, now_s)
        if self._roll_call_wanted and now_s >= self._next_roll_call_s:
            await self._call_roll()

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep()
            except Exception:
                log.exception("a sweep of the feed failed")

    def _receive(self, subject: str, payload: bytes) -> None:
        try:
            role, replica, kind = split(subject)
            envelope = unseal(payload)
            if role != "replica" or envelope.sender != replica:
                raise WireError("a message under another one's subject")
            life = self._life_of(replica, envelope.boot)
            if life is not None:
                life.heard_s, life.silent = self._clock(), False
                self._dispatch(life, kind, envelope)
        except (WireError, ValueError):
            self.stats.malformed += 1

    def _dispatch(self, life: _Life, kind: str, envelope: Envelope) -> None:
        data = bytes(envelope.payload)
        if kind == "hello":
            self._on_hello(life, decode(_hellos, data, MAX_BUS_MESSAGE_BYTES))
        elif not life.present:
            self._roll_call_wanted = True
        elif kind == "load":
            self._on_load(life, decode(_loads, data, MAX_BUS_MESSAGE_BYTES))
        elif kind == "digest":
            delta = decode(_deltas, data, MAX_BUS_MESSAGE_BYTES)
            self._on_delta(life, envelope.generation, envelope.seq, delta)
        elif kind == "bye":
            life.left = True
            self._gone(life, decode(_byes, data, MAX_BUS_MESSAGE_BYTES).reason[:MAX_REASON_CHARS])

    def _life_of(self, replica: str, boot: int) -> _Life | None:
        """The life that this message belongs to; None when it is a former one's."""
        life = self._lives.get(replica)
        if life is not None and (boot < life.boot or (boot == life.boot and life.left)):
            self.stats.old += 1
            return None
        if life is not None and boot == life.boot:
            return life
        if life is not None:
            self.stats.fenced += 1
            self._end(life, "restarted")
        elif not self._has_room():
            self.stats.refused += 1
            return None
        life = _Life(replica, boot, self._clock(), Backoff(self._rng))
        self._lives[replica] = life
        return life

    def _has_room(self) -> bool:
        if len(self._lives) >= self._max_replicas:
            absent = [life for life in self._lives.values() if not life.present]
            if not absent:
                return False
            del self._lives[min(absent, key=lambda life: life.heard_s).replica]
        return True

    def _on_hello(self, life: _Life, hello: ReplicaHello) -> None:
        check_shape(hello.digest)
        life.present = True
        self._listener.on_hello(life.replica, life.boot, hello)
        self._repair_if_due(life, self._clock())

    def _on_load(self, life: _Life, load: ReplicaLoad) -> None:
        self._listener.on_load(life.replica, life.boot, load)
        cursor = life.cursor
        if not cursor.known or not cursor.behind(load.digest_generation, load.digest_seq):
            life.behind_since_s = None
        elif life.behind_since_s is None:
            life.behind_since_s = self._clock()

    def _on_delta(self, life: _Life, generation: int, seq: int, delta: DigestDelta) -> None:
        verdict = life.cursor.accept(generation, seq, delta)
        if verdict is Verdict.NEXT:
            self._apply(life, seq, delta)
        elif verdict is Verdict.GAP:
            self._unknown(life, "gap")
        elif verdict is Verdict.OLD:
            self.stats.old += 1

    def _apply(self, life: _Life, seq: int, delta: DigestDelta) -> None:
        try:
            became_set, became_clear = delta.positions(life.cursor.bits)
        except WireError:
            self._unknown(life, "malformed")
            raise
        self.stats.deltas += 1
        life.behind_since_s = None
        self._listener.on_digest_delta(life.replica, life.boot, seq, became_set, became_clear)

    def _unknown(self, life: _Life, reason: str) -> None:
        self.stats.gaps += 1
        life.cursor.lose()
        life.behind_since_s = None
        self._listener.on_digest_unknown(life.replica, life.boot, reason)
        self._repair_if_due(life, self._clock())

    def _repair_if_due(self, life: _Life, now_s: float) -> None:
        wanted = life.present and not life.cursor.known and not life.silent
        if wanted and life.repair is None and life.backoff.ready(now_s):
            life.backoff.started(now_s)
            life.repair = asyncio.create_task(self._repair(life))

    async def _repair(self, life: _Life) -> None:
        try:
            async with self._repairs:
                frozen = await fetch_snapshot(self._bus, self._cluster, life.replica, life.boot)
            if self._lives.get(life.replica) is life and life.present:
                self._restore(life, frozen)
        except (TimeoutError, WireError):
            self.stats.repairs_failed += 1
        except Exception:
            self.stats.repairs_failed += 1
            log.exception("the digest of %s could not be taken over", life.replica)
        finally:
            life.repair = None

    def _restore(self, life: _Life, frozen: FrozenDigest) -> None:
        self.stats.repairs += 1
        life.cursor.restore(frozen)
        self._listener.on_digest_reset(
            life.replica, life.boot, frozen.generation, frozen.seq, frozen.shape, frozen.bits
        )
        try:
            for seq, became_set, became_clear in life.cursor.followers():
                self.stats.deltas += 1
                self._listener.on_digest_delta(
                    life.replica, life.boot, seq, became_set, became_clear
                )
        except WireError:
            self.stats.malformed += 1
            life.cursor.lose()
        if not life.cursor.known:
            self._unknown(life, "gap")

    def _age(self, life: _Life, now_s: float) -> None:
        silent_s = now_s - life.heard_s
        if silent_s > self._forget_s and not life.present:
            del self._lives[life.replica]
        elif silent_s > self._gone_s:
            self._gone(life, "silent")
        elif silent_s > self._stale_s:
            life.silent = True
            if life.cursor.known:
                self._unknown(life, "silent")
        elif life.behind_since_s is not None and now_s - life.behind_since_s > self._behind_s:
            self._unknown(life, "lost_last_delta")

    def _gone(self, life: _Life, reason: str) -> None:
        if life.present:
            life.present = False
            life.cursor = Cursor()
            life.behind_since_s = None
            self._listener.on_gone(life.replica, life.boot, reason)

    def _end(self, life: _Life, reason: str) -> None:
        self._gone(life, reason)
        if life.repair is not None:
            life.repair.cancel()

    def _on_gap(self, reason: str) -> None:
        """Anything may be missing, of anybody: nothing is believed until it is fetched again."""
        self._roll_call_wanted = True
        for life in list(self._lives.values()):
            if life.cursor.known:
                self._unknown(life, reason)

    async def _call_roll(self) -> None:
        self._roll_call_wanted = False
        self._next_roll_call_s = self._clock() + ROLL_CALL_WAIT_S * self._rng.uniform(0.75, 1.25)
        self.stats.roll_calls += 1
        await self._bus.publish(roll_call_subject(self._cluster), b"")
