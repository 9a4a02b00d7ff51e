"""The bus as the router sees it: late, lossy, out of order. The cursor is the real one.

A replica publishes at its tick while something has changed, and a heartbeat while it works. What
gets lost shows as a gap, and a gap asks for a snapshot, as on the real bus.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from events.cursor import Cursor, Verdict
from events.digest import DigestDelta
from events.load import ReplicaHello, ReplicaLoad
from router.fleet.fleet import Fleet
from tools.sim.clock import Agenda
from tools.sim.replica import SimReplica

TICK_S = 0.05
HEARTBEAT_S = 0.25
IDLE_HEARTBEAT_S = 1.0
SNAPSHOT_S = 0.01


@dataclass(frozen=True, slots=True)
class BusFaults:
    """`lag_s` from publisher to router; `jitter_s` on top lets messages overtake each other;
    a share `loss` of the messages never arrives."""

    lag_s: float = 0.001
    jitter_s: float = 0.0
    loss: float = 0.0


RELIABLE = BusFaults()


class Wire:
    """One replica's messages, from its engine to the fleet. `muted` replicas publish no digests
    (a dead event source)."""

    def __init__(
        self,
        replica: SimReplica,
        hello: ReplicaHello,
        fleet: Fleet,
        agenda: Agenda,
        faults: BusFaults,
        rng: random.Random,
        muted: bool = False,
    ) -> None:
        self.repairs = 0
        self._replica = replica
        self._hello = hello
        self._fleet = fleet
        self._agenda = agenda
        self._faults = faults
        self._rng = rng
        self._muted = muted
        self._cursor = Cursor()
        self._ticking = False
        self._gone = False
        replica.on_change = lambda _: self._wake()

    def join(self) -> None:
        """Say hello; the link stands at once, the first snapshot follows."""
        replica = self._replica
        self._fleet.on_hello(replica.name, replica.boot, self._hello)
        self._fleet.link_state(replica.name, replica.boot, True)
        self._deliver_load(replica.load())
        if not self._muted:
            self._repair()
        self._beat()

    def lose(self) -> None:
        """The link breaks and nothing comes any more."""
        self._gone = True
        replica = self._replica
        self._fleet.link_state(replica.name, replica.boot, False)
        self._fleet.on_gone(replica.name, replica.boot, "dead")

    def retire(self) -> None:
        """The router that listened is no more."""
        self._gone = True

    def _wake(self) -> None:
        if not self._ticking and not self._gone:
            self._ticking = True
            self._agenda.after(TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        if self._gone:
            return
        generation = self._replica.residency.generation
        for seq, delta in self._replica.deltas():
            self._send(lambda seq=seq, delta=delta: self._on_delta(generation, seq, delta))
        if self._replica.residency.generation != generation and not self._muted:
            self._cursor.lose()
            self._repair()

    def _beat(self) -> None:
        if self._gone:
            return
        load = self._replica.load()
        self._send(lambda: self._deliver_load(load))
        working = load.running + load.waiting > 0
        self._agenda.after(HEARTBEAT_S if working else IDLE_HEARTBEAT_S, self._beat)

    def _send(self, arrive: Callable[[], None]) -> None:
        faults = self._faults
        if faults.loss and self._rng.random() < faults.loss:
            return
        late_s = faults.lag_s + (self._rng.random() * faults.jitter_s if faults.jitter_s else 0.0)
        self._agenda.after(late_s, lambda: None if self._gone else arrive())

    def _deliver_load(self, load: ReplicaLoad) -> None:
        replica, cursor = self._replica, self._cursor
        self._fleet.on_load(replica.name, replica.boot, load)
        if self._muted or not cursor.known:
            return
        if cursor.behind(load.digest_generation, load.digest_seq) and not self._faults.jitter_s:
            self._lost()

    def _on_delta(self, generation: int, seq: int, delta: DigestDelta) -> None:
        if self._muted:
            return
        verdict = self._cursor.accept(generation, seq, delta)
        if verdict is Verdict.NEXT:
            positions = delta.positions(self._cursor.bits)
            self._fleet.on_digest_delta(self._replica.name, self._replica.boot, seq, *positions)
        elif verdict is Verdict.GAP:
            self._lost()

    def _lost(self) -> None:
        self.repairs += 1
        self._cursor.lose()
        self._fleet.on_digest_unknown(self._replica.name, self._replica.boot, "gap")
        self._agenda.after(SNAPSHOT_S + self._faults.lag_s, self._repair)

    def _repair(self) -> None:
        """The snapshot, as told last, and what came behind it."""
        replica = self._replica
        frozen = replica.residency.freeze()
        self._cursor.restore(frozen)
        at = (frozen.generation, frozen.seq, frozen.shape, frozen.bits)
        self._fleet.on_digest_reset(replica.name, replica.boot, *at)
        for seq, became_set, became_clear in self._cursor.followers():
            self._fleet.on_digest_delta(replica.name, replica.boot, seq, became_set, became_clear)
