"""One tier as a replica uses it: what it gives is checked, its speed measured, its faults kept.

A block that fails its check is deleted there, not asked for again for a while, and counted by its
reason; a tier that gives many of them is not asked at all for a while.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

from events.cache import CacheFact
from kvstore.block import HeaderDraft, encode, header_of, unsummed
from kvstore.errors import Reason
from kvstore.identity import BlockIdentity
from kvstore.known import Known
from kvstore.layout import Layout
from kvstore.tier import Handle, Health, Outcome, Read, Status, Tier, Write
from kvstore.verify import Verifier

QUARANTINE_S = 60.0
MAX_QUARANTINED = 4_096
DISTRUST_AFTER = 8
"""So many refused blocks within QUARANTINE_S, and the tier is left alone for as long."""

DELETED_AT_ONCE = 1_024

GRACE_S = 0.25
"""How much later than its deadline a batch may end before it is cancelled."""

FORGET_S = 5.0
"""What a slow read has taught counts half after this."""

_NEWEST = 0.2
_LOCAL_LATENCY_MS, _LOCAL_BYTES_PER_MS = 0.2, 2e6
_REMOTE_LATENCY_MS, _REMOTE_BYTES_PER_MS = 2.0, 3e5


class _Learnt:
    """A cost as it was measured lately; `prior` until then. What was dear once is not asked, and of
    what is not asked nothing is learnt: so what lies above the prior fades."""

    def __init__(self, prior: float, clock: Callable[[], float]) -> None:
        self._prior = self._value = prior
        self._clock = clock
        self._at_s = clock()

    def now(self) -> float:
        """What it is believed to be."""
        weight = math.exp2((self._at_s - self._clock()) / FORGET_S)
        return min(self._value, self._prior + weight * (self._value - self._prior))

    def learn(self, measured: float) -> None:
        """One more measurement. One that is dear still brings back what has faded."""
        before = self.now() if measured < self.now() else self._value
        self._value, self._at_s = before + _NEWEST * (measured - before), self._clock()


class Speed:
    """How long reads take: latency of a question, and bytes by time; both learnt as they happen."""

    def __init__(
        self,
        latency_ms: float,
        bytes_per_ms: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._latency_ms = _Learnt(latency_ms, clock)
        self._ms_per_byte = _Learnt(1.0 / bytes_per_ms, clock)

    @property
    def latency_ms(self) -> float:
        """Of one question."""
        return self._latency_ms.now()

    @property
    def ms_per_byte(self) -> float:
        """Of a read, its check included."""
        return self._ms_per_byte.now()

    def predict_ms(self, read_bytes: int) -> float:
        """One question and one read of so many bytes."""
        return self.latency_ms + read_bytes * self.ms_per_byte

    def asked(self, took_ms: float) -> None:
        """One question was answered."""
        self._latency_ms.learn(took_ms)

    def read(self, read_bytes: int, took_ms: float) -> None:
        """So many bytes came, and were checked."""
        self._ms_per_byte.learn(took_ms / read_bytes)


@dataclass(slots=True)
class LevelCounts:
    """Since the start. `refused` and `failed` by reason; `wasted`: came too late, or behind a hole
    or a refused block."""

    asked: int = 0
    hits: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    stored: int = 0
    stored_bytes: int = 0
    present: int = 0
    wasted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)


class Level:
    """Threads may share it. Every header is signed with `mac_key`, since a host's blocks may go on
    to other hosts; it is asked for where others than this host's processes can write. `max_known`:
    how many blocks it is remembered to hold."""

    def __init__(
        self,
        tier: Tier,
        layout: Layout,
        verifier: Verifier,
        mac_key: bytes,
        ttl_s: float | None = None,
        max_known: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        trusted = tier.caps.trusted
        self.tier = tier
        self.name = tier.caps.name
        self.counts = LevelCounts()
        self.known = Known(max_known, ttl_s, clock)
        self.speed = Speed(
            _LOCAL_LATENCY_MS if trusted else _REMOTE_LATENCY_MS,
            _LOCAL_BYTES_PER_MS if trusted else _REMOTE_BYTES_PER_MS,
            clock,
        )
        self._layout = layout
        self._verifier = verifier
        self._mac_key = mac_key
        self._asked_mac = None if trusted else mac_key
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = Lock()
        self._quarantined: OrderedDict[bytes, float] = OrderedDict()
        self._distrusted_until = float("-inf")

    @property
    def usable(self) -> bool:
        """Whether it is worth asking now."""
        return self._clock() >= self._distrusted_until and self.tier.health() is not Health.OPEN

    def facts(self) -> list[CacheFact]:
        """What changed of what it is known to hold. A tier that is away may have lost all of it."""
        if self.tier.health() is Health.OPEN:
            self.known.forget()
        return self.known.drain()

    def fetch_ms(self, blocks: int) -> float:
        """How long so many blocks would take from here."""
        return self.speed.predict_ms(blocks * self._layout.payload_bytes)

    def holds(self, chain: Sequence[bytes], first: int, deadline: float) -> int:
        """How many blocks of a chain from number `first` on are there, and not in quarantine.

        The whole chain is asked for if it may be there whole: a question renews what it finds, and
        heads must not die before their tails.
        """
        if not self.usable:
            return 0
        chain = chain[: self._good_prefix(chain)]
        there = self._ask(chain, deadline)
        if first and there <= first:
            return self._ask(chain[first:], deadline)
        return max(0, there - first)

    def _ask(self, keys: Sequence[bytes], deadline: float) -> int:
        if not keys:
            return 0
        started = self._clock()
        count = self.tier.exists_prefix(keys, deadline)
        self.speed.asked((self._clock() - started) * 1e3)
        self.counts.asked += 1
        self.known.confirm(keys[:count])
        if count < len(keys):
            self.known.deny(keys[count])
        return count

    def read(
        self, blocks: Sequence[BlockIdentity], into: Sequence[memoryview], deadline: float
    ) -> int:
        """Bring blocks into buffers that nobody else can write, and check them there.

        Returns how many from the first one on came, in time and right. When it returns, nobody
        writes the buffers any more.
        """
        started = self._clock()
        reads = [Read(block.key, buffer) for block, buffer in zip(blocks, into, strict=True)]
        outcomes = self._await(self.tier.get(reads, deadline), deadline)
        good = 0
        for block, buffer, outcome in zip(blocks, into, outcomes, strict=True):
            if outcome.status is not Status.HIT or not self._accepts(block, buffer, outcome):
                break
            good += 1
        self._count(outcomes, good, self._clock() - started)
        return good

    def write(
        self,
        blocks: Sequence[BlockIdentity],
        payloads: Sequence[memoryview],
        writer_boot: int,
        deadline: float,
    ) -> None:
        """Offer blocks; returns when nobody reads the payloads any more."""
        writes = [
            self._offer(block, payload, writer_boot)
            for block, payload in zip(blocks, payloads, strict=True)
        ]
        outcomes = self._await(self.tier.put(writes, deadline), deadline)
        counts = self.counts
        there = (Status.STORED, Status.PRESENT)
        self.known.confirm(
            block.key
            for block, outcome in zip(blocks, outcomes, strict=True)
            if outcome.status in there
        )
        with self._lock:
            for outcome in outcomes:
                if outcome.status is Status.STORED:
                    counts.stored += 1
                    counts.stored_bytes += self._layout.payload_bytes
                elif outcome.status is Status.FAILED:
                    counts.failed[outcome.reason] += 1
                else:
                    counts.present += 1

    def _offer(self, block: BlockIdentity, payload: memoryview, writer_boot: int) -> Write:
        layout, ttl_s, caps = self._layout, self._ttl_s, self.tier.caps
        ends_s = ttl_s if caps.dated else None
        if caps.drafts:
            draft = HeaderDraft(unsummed(block, layout, writer_boot, ends_s), self._mac_key)
            return Write(block.key, b"", payload, ttl_s, draft)
        header = header_of(block, layout, payload, writer_boot, ends_s)
        return Write(block.key, encode(header, self._mac_key), payload, ttl_s)

    def refuse(self, key: bytes, reason: Reason) -> None:
        """A block from here was wrong, or is too old: nobody shall find it again. Age alone is no
        fault of the tier."""
        with self._lock:
            self.counts.refused[reason] += 1
            if reason is not Reason.EXPIRED:
                self._quarantine(key)
        self.known.deny(key)
        self.tier.delete([key])

    def clear(self) -> None:
        """Delete what is known to be there; of a memory that others share, what was written or
        found from here."""
        keys = self.known.forget()
        for start in range(0, len(keys), DELETED_AT_ONCE):
            self.tier.delete(keys[start : start + DELETED_AT_ONCE])

    def distrust(self) -> None:
        """Leave the whole tier alone for a while."""
        self._distrusted_until = self._clock() + QUARANTINE_S

    def _accepts(self, block: BlockIdentity, payload: memoryview, outcome: Outcome) -> bool:
        verdict = self._verifier.verdict(outcome, block, payload, self._asked_mac)
        if isinstance(verdict, Reason):
            self.refuse(block.key, verdict)
            return False
        return True

    def _await(self, handle: Handle, deadline: float) -> Sequence[Outcome]:
        """The outcomes; a batch that doesn't end by itself is cancelled and counts as failed."""
        try:
            return handle.result(max(0.0, deadline - self._clock()) + GRACE_S)
        except TimeoutError:
            handle.cancel()
            return handle.result(GRACE_S)

    def _count(self, outcomes: Sequence[Outcome], good: int, took_s: float) -> None:
        counts, read_bytes = self.counts, good * self._layout.payload_bytes
        hits = sum(outcome.status is Status.HIT for outcome in outcomes)
        with self._lock:
            counts.hits += good
            counts.wasted += hits - good
            counts.read_bytes += read_bytes
            counts.read_s += took_s
            for outcome in outcomes:
                if outcome.status is Status.FAILED:
                    counts.failed[outcome.reason] += 1
            if good:
                self.speed.read(read_bytes, took_s * 1e3)

    def _good_prefix(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            if not self._quarantined:
                return len(keys)
            self._forget_old(self._clock())
            bad = self._quarantined
            return next((place for place, key in enumerate(keys) if key in bad), len(keys))

    def _quarantine(self, key: bytes) -> None:
        now = self._clock()
        self._quarantined[key] = now + QUARANTINE_S
        while len(self._quarantined) > MAX_QUARANTINED:
            self._quarantined.popitem(last=False)
        self._forget_old(now)
        if len(self._quarantined) >= DISTRUST_AFTER:
            self.distrust()

    def _forget_old(self, now: float) -> None:
        while self._quarantined and next(iter(self._quarantined.values())) <= now:
            self._quarantined.popitem(last=False)
