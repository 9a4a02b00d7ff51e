"""Where backends enter the fleet: between what the bus brings and what the fleet is told.

A backend lives in the fleet from its first answered probe on. Its bridge, where it has one, brings
a life of its own with the digest; when the bridge goes, the backend stays, without locality. The
bus can't make anybody a backend: only the cluster file can.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
import numpy as np

from events.load import OWN_ENGINE, DigestShape, ReplicaHello, ReplicaLoad, silent_load
from router.backends.attempt import ForeignAttempt
from router.backends.health import Health
from router.backends.rates import Rates
from router.backends.roster import Backend
from router.backends.silence import Silence
from router.backends.tail import ToldUsage
from router.fleet.expected import pool_name
from router.fleet.fleet import Fleet

UNHINDERED = 0.9
"""The least part of a stream's time in which its client took what came."""


class Seat:
    """One backend's place. `bridge_boot` is its bridge's life, None without one. `quiet`: attempts
    whose prefill should be over, since when it was not heard."""

    def __init__(self, backend: Backend, hello: ReplicaHello) -> None:
        self.backend = backend
        self.hello = hello
        self.model_context_tokens = hello.context_tokens
        self.health = Health()
        self.rates = Rates()
        self.bridge_boot: int | None = None
        self.lives = 0
        self.quiet: set[ForeignAttempt] = set()
        self.silence = Silence()
        self.stalled = False
        self._heard_s = 0.0
        self._alone: dict[ForeignAttempt, bool] = {}

    @property
    def boot(self) -> int:
        """Of its present life in the fleet. A bridge's is a time in ms: always the larger."""
        return self.lives if self.bridge_boot is None else self.bridge_boot

    @property
    def state(self) -> str:
        """As a link's state is shown."""
        return "up" if self.health.up else "unreachable"

    @property
    def in_flight(self) -> int:
        """Attempts on their way there."""
        return len(self._alone)

    def limit_context(self, tokens: int | None) -> None:
        """As the server tells it, where the cluster file does not say."""
        if tokens is not None and not self.backend.config.context_tokens:
            most = min(tokens, self.model_context_tokens)
            self.hello = msgspec.structs.replace(self.hello, context_tokens=most)

    def limited(self, hello: ReplicaHello) -> ReplicaHello:
        """What a bridge says, which has not asked the server."""
        context_tokens = min(hello.context_tokens, self.hello.context_tokens)
        return msgspec.structs.replace(hello, context_tokens=context_tokens)

    @contextmanager
    def carrying(self, attempt: ForeignAttempt) -> Iterator[None]:
        """While an attempt is on its way there."""
        self._alone[attempt] = not any(other.ttft_ms is None for other in self._alone)
        try:
            yield
        finally:
            del self._alone[attempt]

    def heard(self) -> None:
        """Bytes of an answer came: it lives, however long its probes take."""
        self.health.heard()
        self._heard_s, self.stalled = time.monotonic(), False
        while self.quiet:
            self.quiet.pop().backend_lives()

    @property
    def hangs(self) -> bool:
        """Whether it was silent for longer than one of its requests could keep it so. What that one
        found under way when it came is not its own."""
        quiet_s = time.monotonic() - self._heard_s
        return any(
            min(quiet_s, attempt.silent_s) > self.silence.allowed_s(attempt.most_tokens)
            for attempt in self._alone
        )

    def give_up(self, after_s: float) -> None:
        """What was on its way there for so long is waited for no more."""
        for attempt in self._alone:
            if attempt.silent_s >= after_s:
                attempt.give_up()

    def learn(self, attempt: ForeignAttempt, usage: ToldUsage) -> None:
        """From a whole answer, before its `carrying` ends. A plain one was all there before its
        client could hold it up; of a stream that was held up nobody knows what it took."""
        if attempt.ttft_ms is None:
            self.silence.answered(usage.completion_tokens, attempt.served_ms)
            return
        if self._alone[attempt] and usage.cached_tokens is not None:
            new_tokens = max(1, usage.prompt_tokens - usage.cached_tokens)
            self.rates.prefilled(new_tokens, attempt.ttft_ms)
        if attempt.served_ms < UNHINDERED * attempt.elapsed_ms:
            return
        self.silence.answered(usage.completion_tokens, attempt.elapsed_ms)
        duration_ms = attempt.elapsed_ms - attempt.ttft_ms
        self.rates.decoded(len(self._alone), usage.completion_tokens, duration_ms)

    def load(self, told: ReplicaLoad | None = None) -> ReplicaLoad:
        """A heartbeat: what is in flight is in this router's own ledger, the speed is as learnt."""
        told = told or silent_load(self.hello.total_blocks)
        prefill, decode = self.rates.prefill, self.rates.decode
        return msgspec.structs.replace(told, prefill=prefill, decode=decode)


class Joiner:
    """Implements events.feed.FeedListener in front of the fleet; `probed` is the probes' side."""

    def __init__(self, fleet: Fleet, seats: Mapping[str, Seat]) -> None:
        self.refused: Counter[str] = Counter()
        self._fleet = fleet
        self._seats = seats

    # What probes and requests tell

    def probed(self, seat: Seat, answered: bool) -> None:
        """The backend answered a probe or a request, or did not."""
        changed = seat.health.success() if answered else seat.health.failure()
        if seat.health.up and (changed or self._lost(seat)):
            self._rise(seat)
        elif changed:
            self._fleet.link_state(seat.backend.id, seat.boot, False)
        detail = f"nobody answers at {seat.backend.url}"
        self._fleet.alarms.set(seat.health.down, "backend_down", seat.backend.id, detail)
        if seat.health.up and seat.bridge_boot is None:
            self._fleet.on_load(seat.backend.id, seat.boot, seat.load())

    def watch(self, seat: Seat, patience_s: float) -> None:
        """Now and then: one that hangs is named. What it has moves, and it is tried again later by
        a single request at a time. Where nobody else is there to serve, it is waited for, but no
        request longer than `patience_s`."""
        replica = seat.backend.id
        if hangs := seat.hangs:
            seat.stalled = True
        self._fleet.link_stalled(replica, seat.boot, seat.stalled)
        if hangs and self._fleet.others_serve(replica):
            self._fleet.replica_hangs(replica, seat.boot)
            seat.give_up(0.0)
        elif hangs:
            seat.give_up(patience_s)

    def _lost(self, seat: Seat) -> bool:
        """The fleet had no room for it before."""
        return self._fleet.member(seat.backend.id) is None

    def _rise(self, seat: Seat) -> None:
        """It is there, maybe again: an engine that was away has an empty cache."""
        seat.stalled = False
        if seat.bridge_boot is None:
            seat.lives += 1
            self._fleet.on_hello(seat.backend.id, seat.boot, seat.hello)
        elif member := self._fleet.member(seat.backend.id):
            self._fleet.on_hello(seat.backend.id, seat.boot, seat.limited(member.hello))
        self._fleet.link_state(seat.backend.id, seat.boot, True)

    # What the feed tells

    def on_hello(self, replica: str, boot: int, hello: ReplicaHello) -> None:
        seat = self._seats.get(replica)
        if seat is None and hello.engine == OWN_ENGINE:
            self._fleet.on_hello(replica, boot, hello)
        elif seat is None:
            self._refuse("unknown_backend", replica, "the cluster file has no such backend")
        elif not self._is_bridge(seat, hello):
            self._refuse(
                "backend_mismatch", replica, "its bridge tells of another engine, address or pool"
            )
        else:
            seat.bridge_boot = boot
            self._fleet.alarms.clear("backend_mismatch", replica)
            self._fleet.on_hello(replica, boot, seat.limited(hello))
            self._fleet.link_state(replica, boot, seat.health.up)

    def on_load(self, replica: str, boot: int, load: ReplicaLoad) -> None:
        seat = self._seats.get(replica)
        if seat is None:
            self._fleet.on_load(replica, boot, load)
        elif boot == seat.bridge_boot:
            self._fleet.on_load(replica, boot, seat.load(load))

    def on_digest_reset(
        self,
        replica: str,
        boot: int,
        generation: int,
        seq: int,
        shape: DigestShape,
        bits: np.ndarray,
    ) -> None:
        self._fleet.on_digest_reset(replica, boot, generation, seq, shape, bits)

    def on_digest_delta(
        self,
        replica: str,
        boot: int,
        seq: int,
        set_positions: np.ndarray,
        clear_positions: np.ndarray,
    ) -> None:
        self._fleet.on_digest_delta(replica, boot, seq, set_positions, clear_positions)

    def on_digest_unknown(self, replica: str, boot: int, reason: str) -> None:
        self._fleet.on_digest_unknown(replica, boot, reason)

    def on_gone(self, replica: str, boot: int, reason: str) -> None:
        seat = self._seats.get(replica)
        if seat is None:
            self._fleet.alarms.clear("unknown_backend", replica)
            self._fleet.on_gone(replica, boot, reason)
        elif boot == seat.bridge_boot:
            seat.bridge_boot = None
            self._fleet.link_state(replica, boot, False)
            self._fleet.on_gone(replica, boot, reason)
            if seat.health.up:
                self._rise(seat)

    def _is_bridge(self, seat: Seat, hello: ReplicaHello) -> bool:
        """Whether it tells of this very backend, with the block keys that we would compute."""
        ours = seat.hello
        same = (hello.engine, hello.link_url) == (ours.engine, ours.link_url)
        return seat.backend.bridged and same and pool_name(hello) == pool_name(ours)

    def _refuse(self, name: str, replica: str, detail: str) -> None:
        self.refused[name] += 1
        self._fleet.alarms.raise_(name, replica, detail)
