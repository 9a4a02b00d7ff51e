"""A tier that does what a test says: slow, hanging, corrupt, or away."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Event

from kvstore.block import Whose
from kvstore.handle import Job, WorkThread
from kvstore.tier import Handle, Health, Landed, Outcome, Read, Status, TierStats, Write
from tests.fakes.memory_tier import MemoryTier

POLL_S = 0.002


class SlowTier:
    """Over a MemoryTier. A read waits for `gate` (block by block where `pass_blocks` is given),
    looking at cancel and deadline meanwhile; `spoil` may change what landed; `deaf` readers look at
    neither: only `gate` frees them."""

    def __init__(self, name: str = "slow", trusted: bool = True) -> None:
        self.inner = MemoryTier(1 << 24)
        caps = self.inner.caps
        self.caps = type(caps)(
            name=name,
            max_value_bytes=caps.max_value_bytes,
            trusted=trusted,
            shared=not trusted,
        )
        self.gate = Event()
        self.gate.set()
        self.reading = Event()
        self.pass_blocks = 0
        self.deaf = False
        self.state = Health.OK
        self.spoil: Callable[[int, memoryview], None] = lambda place, payload: None
        self.written: list[Write] = []
        self.put_gate = Event()
        self.put_gate.set()
        self._worker = WorkThread("slow-tier", 64, 1 << 30)

    def exists_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        return self.inner.exists_prefix(keys, deadline)

    def get(self, reads: Sequence[Read], deadline: float, landed: Landed | None = None) -> Handle:
        return self._worker.submit(Job(lambda job: self._get(job, reads), len(reads), deadline))

    def put(self, writes: Sequence[Write], deadline: float) -> Handle:
        def work(job: Job) -> Sequence[Outcome]:
            while not self.put_gate.wait(POLL_S):
                if job.stopping:
                    return [job.stopping] * len(writes)
            self.written += writes
            return self.inner.put(writes, deadline).result(0)

        return self._worker.submit(Job(work, len(writes), deadline))

    def delete(self, keys: Sequence[bytes]) -> None:
        self.inner.delete(keys)

    def purge(self, whose: Whose) -> int:
        return self.inner.purge(whose)

    def stats(self) -> TierStats:
        return self.inner.stats()

    def health(self) -> Health:
        return self.state

    def drain(self, timeout_s: float) -> None:
        self._worker.drain(timeout_s)

    def close(self) -> None:
        self.gate.set()
        self.put_gate.set()
        self._worker.close()
        self.inner.close()

    def _get(self, job: Job, reads: Sequence[Read]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for place, read in enumerate(reads):
            self.reading.set()
            while place >= self.pass_blocks and not self.gate.wait(POLL_S):
                if job.stopping and not self.deaf:
                    return outcomes + [job.stopping] * (len(reads) - len(outcomes))
            far = time.monotonic() + 60.0
            outcomes += self.inner.get([read], far).result(0)
            if outcomes[-1].status is Status.HIT:
                self.spoil(place, read.into)
        return outcomes
