"""A tier whose store sees sealed blocks only. Sealing and opening happen in the caller's thread."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.block import Whose
from kvstore.errors import BadBlockError
from kvstore.handle import Ended
from kvstore.seal import Sealer
from kvstore.tier import (
    WRONG_SIZE,
    Caps,
    Handle,
    Health,
    Landed,
    Outcome,
    Read,
    Status,
    Tier,
    TierStats,
    Write,
    failed,
    hit,
)


class SealedTier:
    """`inner`, for blocks of the sealer's layout."""

    def __init__(self, inner: Tier, sealer: Sealer) -> None:
        self._inner = inner
        self._sealer = sealer

    @property
    def caps(self) -> Caps:
        """Of the store."""
        return self._inner.caps

    def exists_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """As the store says."""
        return self._inner.exists_prefix(keys, deadline)

    def get(self, reads: Sequence[Read], deadline: float, landed: Landed | None = None) -> Handle:
        """Read sealed blocks beside, then open them into their buffers."""
        beside = [memoryview(bytearray(self._sealer.sealed_bytes)) for _ in reads]
        asked = [Read(read.key, into) for read, into in zip(reads, beside, strict=True)]
        return _Opening(self._inner.get(asked, deadline), self._sealer, reads, beside, landed)

    def put(self, writes: Sequence[Write], deadline: float) -> Handle:
        """Seal blocks and store what is not there yet."""
        try:
            sealed = [self._sealed(write) for write in writes]
        except BadBlockError:
            return Ended([WRONG_SIZE] * len(writes))
        return self._inner.put(sealed, deadline)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Forget blocks."""
        self._inner.delete(keys)

    def purge(self, whose: Whose) -> int:
        """Forget all their blocks."""
        return self._inner.purge(whose)

    def stats(self) -> TierStats:
        """Of the store."""
        return self._inner.stats()

    def health(self) -> Health:
        """Of the store."""
        return self._inner.health()

    def drain(self, timeout_s: float) -> None:
        """Let what is under way end."""
        self._inner.drain(timeout_s)

    def close(self) -> None:
        """End everything."""
        self._inner.close()

    def _sealed(self, write: Write) -> Write:
        header, payload = self._sealer.seal(write.header, write.payload)
        return Write(write.key, header, memoryview(payload), write.ttl_s)


class _Opening:
    """A batch of sealed blocks; they are opened, once, by whoever asks for the result."""

    def __init__(
        self,
        inner: Handle,
        sealer: Sealer,
        reads: Sequence[Read],
        beside: Sequence[memoryview],
        landed: Landed | None,
    ) -> None:
        self._inner = inner
        self._sealer = sealer
        self._reads = reads
        self._beside = beside
        self._landed = landed
        self._outcomes: list[Outcome] | None = None

    def result(self, timeout_s: float) -> Sequence[Outcome]:
        """One outcome per request, in order. Raises TimeoutError while it has not ended."""
        if self._outcomes is None:
            found = self._inner.result(timeout_s)
            self._outcomes = [self._opened(place, outcome) for place, outcome in enumerate(found)]
        return self._outcomes

    def cancel(self) -> None:
        """Nobody opens blocks afterwards, unless the result has been asked for before."""
        self._inner.cancel()

    def _opened(self, place: int, outcome: Outcome) -> Outcome:
        if outcome.status is not Status.HIT:
            return outcome
        try:
            into = self._reads[place].into
            header = self._sealer.unseal(outcome.header, self._beside[place], into)
        except BadBlockError as error:
            return failed(error.reason)
        if self._landed is not None:
            self._landed(place)
        return hit(header)
