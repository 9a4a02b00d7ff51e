"""A tier over sessions: what a fault of ours left in the middle of a batch is not used again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

from kvstore.block import Whose
from kvstore.connector import ConnectorTier, Limits, Settle
from kvstore.tier import MISS, Caps, Read, Write


class Session:
    """Fails in an unforeseen way while it is `faulty`, and again if it is used after that."""

    faulty = False

    def __init__(self) -> None:
        self.broken = self.closed = False

    def read(self, reads: Sequence[Read], deadline: float, settle: Settle) -> None:
        self.broken = self.broken or Session.faulty
        if self.broken:
            raise ValueError("half of an answer was read")
        for place in range(len(reads)):
            settle(place, MISS)

    def write(self, writes: Sequence[Write], deadline: float, settle: Settle) -> None:
        raise AssertionError

    def exists_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        return 0

    def delete(self, keys: Sequence[bytes], deadline: float) -> None:
        raise AssertionError

    def purge(self, whose: Whose, deadline: float) -> int:
        raise AssertionError

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_a_session_that_a_fault_left_in_the_middle_is_closed() -> None:
    opened: list[Session] = []

    def connect(_deadline: float) -> Session:
        opened.append(Session())
        return opened[-1]

    caps = Caps(name="faulty", max_value_bytes=1 << 20, trusted=False, shared=True)
    with closing(ConnectorTier(caps, connect, Limits(readers=1))) as tier:

        def got() -> str:
            reads = [Read(b"k" * 16, memoryview(bytearray(8)))]
            (outcome,) = tier.get(reads, time.monotonic() + 10).result(20)
            return outcome.reason or outcome.status.name

        assert got() == "MISS"
        Session.faulty = True
        assert got() == "fault"
        assert opened[0].closed
        Session.faulty = False
        assert got() == "MISS"
        assert len(opened) == 2
