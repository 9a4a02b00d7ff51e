"""What a replica tells the bus: hello, load, digest, bye, and its snapshot when asked.

Reads the engine (journal and load), never waits for it and never makes it wait. What gets lost on
the bus shows as a missing number; readers then ask for the snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from configs.schema import ReplicaConfig
from events.bus import Bus, Subscription
from events.cache import CacheFact
from events.envelope import seal, unseal
from events.errors import WireError
from events.load import (
    AdapterNote,
    FetchFit,
    ReplicaBye,
    ReplicaHello,
    ReplicaLoad,
    WarmBlocks,
)
from events.secrets import tenant_tag
from events.snapshot import FrozenDigest, SnapshotRequest, decode_request
from events.subjects import replica_subject, roll_call_subject, snapshot_subject
from replica.engine.messages import AdapterState, Engine, EngineLoad
from replica.residency import Numbered, Residency

log = logging.getLogger(__name__)

IDLE_FACTOR = 4.0
"""Ticks and heartbeats of an idle replica are this much slower."""

MIN_HELLO_GAP_S = 0.1
"""However many roll calls come in."""

FROZEN_KEPT = 4
"""Snapshots that readers are in the middle of fetching."""

CLOSE_S = 1.0


class ShownTiers(Protocol):
    """The tiers below the device, as far as readers are told of them. Called on the event loop."""

    def drain_facts(self) -> list[list[CacheFact]]:
        """What each of them confirmed or denied since the last call."""

    def fetch_fits(self) -> tuple[FetchFit, ...]:
        """How fast each of them gives blocks now, and each of the peers."""

    def peer_names(self) -> tuple[str, ...]:
        """Stores of other hosts that can be read too."""


class Publisher:
    """One replica's voice for one boot. Runs on the event loop; `tick` is one beat of it."""

    def __init__(
        self,
        bus: Bus,
        cluster: str,
        replica_id: str,
        hello: ReplicaHello,
        engine: Engine,
        config: ReplicaConfig,
        boot: int,
        clock: Callable[[], float] = time.monotonic,
        tiers: ShownTiers | None = None,
        secret: bytes | None = None,
    ) -> None:
        """`hello.digest` is the first generation's shape; later ones go out by themselves. `tiers`:
        those that the hello names. `secret`: the cluster's, to tell which tenants hold how much."""
        self.boot = boot
        self.draining = False
        self.superseded = False
        self.residency = Residency(hello.digest)
        self.failures = 0
        self._bus = bus
        self._cluster = cluster
        self._id = replica_id
        self._hello = hello
        self._engine = engine
        self._tiers = tiers
        self._secret = secret
        self._config = config
        self._clock = clock
        self._busy = False
        self._last_hello_s = self._last_load_s = float("-inf")
        self._hello_asked = self._load_asked = False
        self._frozen: list[FrozenDigest] = []
        self._wake = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Serve snapshots first, then say hello: whoever hears it may ask at once."""
        bus, cluster = self._bus, self._cluster
        self._subscriptions = [
            await bus.serve(snapshot_subject(cluster, self._id), self._serve_snapshot),
            await bus.subscribe(roll_call_subject(cluster), self._on_roll_call),
            await bus.subscribe(self._subject("hello"), self._on_own_hello),
        ]
        bus.on_gap(self._on_gap)
        await self.tick()
        self._task = asyncio.create_task(self._run())

    async def close(self, reason: str = "shutdown") -> None:
        """Say bye and fall silent; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_S)
        await self._unsubscribe()
        if not self.superseded:
            await self._say("bye", ReplicaBye(reason=reason))

    def set_draining(self, draining: bool) -> None:
        """Goes out with a heartbeat at once."""
        self.draining = draining
        self._ask(hello=False)

    async def tick(self) -> None:
        """Drain the journal, tell what changed, and whatever else is due.

        An engine that is not alive is not spoken for: readers see silence.
        """
        load = self._engine.load()
        if self.superseded or not load.alive:
            return
        facts = self._engine.drain_facts()
        below = self._tiers.drain_facts() if self._tiers is not None else []
        generation = self.residency.generation
        await self._say_deltas(self.residency.apply(facts, *below))
        was_busy, self._busy = self._busy, bool(facts) or load.running + load.waiting > 0
        if was_busy and not self._busy:
            # The last report still tells of work: for a whole idle interval it would cost us.
            self._load_asked = True
        if self.residency.generation != generation:
            self._hello_asked = self._load_asked = True
        now_s = self._clock()
        self._meet_peers()
        self._note_adapters(load.adapters)
        if self._hello_due(now_s):
            self._last_hello_s, self._hello_asked = now_s, False
            hello = msgspec.structs.replace(self._hello, digest=self.residency.shape)
            await self._say("hello", hello)
        if self._load_asked or now_s - self._last_load_s >= self._paced_s(
            self._config.heartbeat_ms
        ):
            self._last_load_s, self._load_asked = now_s, False
            fetch = self._tiers.fetch_fits() if self._tiers is not None else ()
            await self._say("load", self._report(load, fetch))

    def _meet_peers(self) -> None:
        """Their names are known once they were reached."""
        names = self._tiers.peer_names() if self._tiers is not None else ()
        if names != self._hello.peers:
            self._hello = msgspec.structs.replace(self._hello, peers=names)
            self._hello_asked = True

    def _note_adapters(self, state: AdapterState) -> None:
        """Which are in memory, what their loads took, and which can't be loaded for now."""
        now_s = self._clock()
        notes = tuple(
            AdapterNote(
                note.name,
                note.digest,
                note.name in state.resident,
                state.load_ms.get(note.name, note.load_ms),
                now_s < state.avoided_until_s.get(note.name, 0.0),
            )
            for note in self._hello.adapters
        )
        if notes != self._hello.adapters:
            self._hello = msgspec.structs.replace(self._hello, adapters=notes)
            self._hello_asked = True

    async def _run(self) -> None:
        while not self.superseded:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self.tick()
            except Exception:
                self.failures += 1
                log.exception("publishing failed; readers will see a gap and ask again")
        await self._unsubscribe()

    async def _unsubscribe(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()

    def _pause_s(self) -> float:
        """Until the next tick. A hello that was asked for too early is said as soon as it may be:
        a router that starts waits for it."""
        pause_s = self._paced_s(self._config.digest_tick_ms)
        due_s = self._last_hello_s + MIN_HELLO_GAP_S - self._clock()
        return min(pause_s, due_s) if self._hello_asked and due_s > 0 else pause_s

    def _paced_s(self, busy_ms: float) -> float:
        return busy_ms / 1e3 * (1.0 if self._busy else IDLE_FACTOR)

    def _hello_due(self, now_s: float) -> bool:
        wait_s = MIN_HELLO_GAP_S if self._hello_asked else self._config.hello_ms / 1e3
        return now_s - self._last_hello_s >= wait_s

    def _ask(self, hello: bool) -> None:
        """Wakes the loop once: a flood of roll calls is not a flood of ticks."""
        if not self._load_asked:
            self._wake.set()
        self._load_asked = True
        self._hello_asked = self._hello_asked or hello

    def _on_roll_call(self, _subject: str, _payload: bytes) -> None:
        self._ask(hello=True)

    def _on_gap(self, _reason: str) -> None:
        self._ask(hello=True)

    def _on_own_hello(self, _subject: str, payload: bytes) -> None:
        """Our id under a larger boot: somebody took over while we could not be heard."""
        with contextlib.suppress(WireError):
            if unseal(payload).boot > self.boot and not self.superseded:
                self.superseded = True
                self._wake.set()
                log.error("replica id %s has a newer holder: no longer publishing", self._id)

    async def _serve_snapshot(self, payload: bytes) -> bytes:
        """Chunk 0 of the state told last, or a later chunk of a state frozen before.

        A state that is no longer kept is answered with chunk 0 of the newest: the reader sees that
        it doesn't fit, and starts over.
        """
        request = decode_request(payload)
        kept = self._find_frozen(request) if request.chunk else None
        frozen, index = (kept, request.chunk) if kept else (self._freeze(), 0)
        return seal(self._id, self.boot, frozen.generation, frozen.seq, frozen.chunk(index))

    def _find_frozen(self, request: SnapshotRequest) -> FrozenDigest | None:
        wanted = (request.generation, request.seq)
        return next((one for one in self._frozen if (one.generation, one.seq) == wanted), None)

    def _freeze(self) -> FrozenDigest:
        newest = self.residency.freeze()
        if newest not in self._frozen[-1:]:
            self._frozen = [*self._frozen[1 - FROZEN_KEPT :], newest]
        return newest

    def _report(self, load: EngineLoad, fetch: tuple[FetchFit, ...]) -> ReplicaLoad:
        report = load_report(load, self.residency, self.draining, fetch)
        if self._secret is None or load.warm is None:
            return report
        held = ((tenant_tag(self._secret, name), blocks) for name, blocks in load.warm.items())
        return msgspec.structs.replace(report, warm=tuple(WarmBlocks(*of) for of in held))

    async def _say_deltas(self, deltas: list[Numbered]) -> None:
        generation = self.residency.generation
        for seq, delta in deltas:
            await self._publish("digest", generation, seq, delta)

    async def _say(self, kind: str, message: msgspec.Struct) -> None:
        await self._publish(kind, self.residency.generation, self.residency.seq, message)

    async def _publish(self, kind: str, generation: int, seq: int, body: msgspec.Struct) -> None:
        await self._bus.publish(
            self._subject(kind), seal(self._id, self.boot, generation, seq, body)
        )

    def _subject(self, kind: str) -> str:
        return replica_subject(self._cluster, self._id, kind)


def load_report(
    load: EngineLoad, residency: Residency, draining: bool, fetch: tuple[FetchFit, ...] = ()
) -> ReplicaLoad:
    """The heartbeat: the engine's snapshot beside the digest that was told last."""
    return ReplicaLoad(
        digest_generation=residency.generation,
        digest_seq=residency.seq,
        waiting=load.waiting,
        running=load.running,
        queued_prefill_tokens=load.queued_prefill_tokens,
        running_context_tokens=load.running_context_tokens,
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        total_blocks=load.total_blocks,
        step_ms=load.step_ms,
        prefill=load.prefill,
        decode=load.decode,
        seen=load.seen,
        draining=draining,
        engine_steps=load.steps,
        digest_false_positive_rate=residency.false_positive_rate,
        prompt_tokens_total=load.prompt_tokens_total,
        cached_tokens_total=load.cached_tokens_total,
        preemptions_total=load.preemptions_total,
        fetch=fetch,
    )
