"""An LMCache server on this host as a store of blocks: its memory, its eviction, its lower tiers.

Blocks are ours, with headers and MACs: engines of other kinds that use the server neither see them
nor can write one that we would take. They lie there under a salt of their own.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from kvstore.block import MAX_HEADER_BYTES, Whose, header_bytes
from kvstore.connector import ConnectorTier, Limits, Settle
from kvstore.errors import BadBlockError
from kvstore.remote.lmcache.program import Program
from kvstore.remote.lmcache.sidecar import (
    FULL,
    HEAD,
    MAX_ITEMS,
    MAX_VALUE_BYTES,
    MISS,
    OK,
    OP_ASK,
    OP_DELETE,
    OP_READ,
    OP_WRITE,
    PRESENT,
    READ_ITEM,
    WRITE_ITEM,
    WRONG_SIZE,
)
from kvstore.stream import Part, Stream, WireBrokenError
from kvstore.tier import MISS as MISSED
from kvstore.tier import PRESENT as THERE
from kvstore.tier import STORED as WRITTEN
from kvstore.tier import WRONG_SIZE as UNFIT
from kvstore.tier import Caps, Outcome, Read, Write, failed, hit

HEADER_START = 12
"""So many bytes say how long a header is."""
DEFAULT_PORT = 5_555
_WRITTEN = {OK: WRITTEN, PRESENT: THERE, FULL: failed("full"), WRONG_SIZE: UNFIT}


@dataclass(frozen=True, slots=True)
class LMCacheAddress:
    """Where the server is, and whose Python speaks with it."""

    server: str
    python: Path
    http_port: int = 0

    @classmethod
    def from_url(cls, url: str) -> LMCacheAddress:
        """`lmcache://127.0.0.1[:port]?python=PATH[&http=PORT]`: with the server's HTTP port blocks
        can be deleted. Loopback only. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme != "lmcache" or not parts.hostname or parts.username:
            raise ValueError("an LMCache server's URL is lmcache://127.0.0.1[:port]?python=PATH")
        if not _is_loopback(parts.hostname):
            raise ValueError("an LMCache server is used on this host only: lmcache://127.0.0.1")
        options = dict(parse_qsl(parts.query))
        http = options.get("http", "0")
        if not http.isdecimal() or int(http) > 0xFFFF:
            raise ValueError("http is the port of the LMCache server's HTTP interface")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return cls(
            f"tcp://{host}:{parts.port or DEFAULT_PORT}",
            Path(options.get("python", sys.executable)),
            int(http),
        )


def lmcache_tier(address: LMCacheAddress, limits: Limits | None = None) -> LMCacheTier:
    """Raises StoreError without the Python that it names."""
    program = Program(address.python, address.server, address.http_port)
    program.start()
    return LMCacheTier(program, limits)


class LMCacheTier(ConnectorTier):
    """A ConnectorTier with a child of its own."""

    def __init__(self, program: Program, limits: Limits | None = None) -> None:
        caps = Caps(
            name="lmcache",
            max_value_bytes=MAX_VALUE_BYTES,
            trusted=False,
            shared=True,
        )
        super().__init__(caps, lambda until: LMCacheSession(program, until), limits)
        self.program = program

    def close(self) -> None:
        """Ends the sidecar too."""
        super().close()
        self.program.close()


class LMCacheSession:
    """One connection to the sidecar; see connector.Session."""

    def __init__(self, program: Program, deadline: float) -> None:
        self._stream = Stream(program.session(deadline))

    def read(self, reads: Sequence[Read], deadline: float, settle: Settle) -> None:
        """Each value lands behind its header."""
        for first in range(0, len(reads), MAX_ITEMS):
            part = reads[first : first + MAX_ITEMS]
            items = [READ_ITEM.pack(read.key, len(read.into) + MAX_HEADER_BYTES) for read in part]
            self._ask(OP_READ, len(part), items, deadline)
            for place, read in enumerate(part, first):
                settle(place, self._value(read.into, deadline))

    def write(self, writes: Sequence[Write], deadline: float, settle: Settle) -> None:
        """One after the other: each answer is waited for, as the server's memory may be full."""
        for place, write in enumerate(writes):
            size = len(write.header) + len(write.payload)
            item = WRITE_ITEM.pack(write.key, size)
            self._ask(OP_WRITE, 1, [item, write.header, write.payload], deadline)
            status, _ = self._answer(deadline)
            settle(place, _WRITTEN.get(status, failed("refused")))

    def exists_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """Counted by the sidecar."""
        count = 0
        for first in range(0, len(keys), MAX_ITEMS):
            part = keys[first : first + MAX_ITEMS]
            self._ask(OP_ASK, len(part), part, deadline)
            status, found = self._answer(deadline)
            if status != OK or found > len(part):
                raise WireBrokenError("not a count")
            count += found
            if found < len(part):
                break
        return count

    def delete(self, keys: Sequence[bytes], deadline: float) -> None:
        """Only where the server's HTTP port is known."""
        for first in range(0, len(keys), MAX_ITEMS):
            part = keys[first : first + MAX_ITEMS]
            self._ask(OP_DELETE, len(part), part, deadline)
            for _ in part:
                self._answer(deadline)

    def purge(self, whose: Whose, deadline: float) -> int:
        """The server can't be asked whose blocks are whose: they age out."""
        return 0

    def interrupt(self) -> None:
        """Breaks the connection: the sidecar lets go of what it held for it."""
        self._stream.interrupt()

    def close(self) -> None:
        """Idempotent."""
        self._stream.close()

    def _ask(self, op: int, count: int, items: Sequence[Part], deadline: float) -> None:
        self._stream.send([HEAD.pack(op, count), *items], deadline)

    def _answer(self, deadline: float) -> tuple[int, int]:
        status, size = HEAD.unpack(self._stream.take(HEAD.size, deadline))
        return status, size

    def _value(self, into: memoryview, deadline: float) -> Outcome:
        status, size = self._answer(deadline)
        if status == MISS:
            return MISSED
        if status != OK:
            return UNFIT if status == WRONG_SIZE else failed("refused")
        start = self._stream.take(min(size, HEADER_START), deadline)
        try:
            fits = header_bytes(start) + len(into) == size
        except BadBlockError:
            fits = False
        if not fits:
            self._stream.skip(size - len(start), deadline)
            return UNFIT
        header = start + self._stream.take(size - len(into) - len(start), deadline)
        self._stream.receive(into, deadline)
        return hit(header)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
