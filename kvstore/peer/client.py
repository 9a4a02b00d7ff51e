"""Pulls runs of blocks from another host's kvd, straight into the callers' memory.

A broken connection is opened once more, and the run goes on with the block it broke in. Nothing
can be written or deleted there: a peer's blocks are its own.
"""

from __future__ import annotations

import secrets
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from kvstore.block import MAX_HEADER_BYTES, Whose
from kvstore.connector import CONNECT_S, ConnectorTier, Limits, Settle
from kvstore.errors import StoreError
from kvstore.handle import Job
from kvstore.peer.frames import (
    BLOCK_HEAD,
    MAC_BYTES,
    MAGIC,
    MAX_KEYS,
    MAX_PAYLOAD_BYTES,
    MIN_SECRET_BYTES,
    NONCE_BYTES,
    NUMBER,
    Ended,
    Frame,
    Kind,
    Pull,
    encode,
    encode_pull,
    proof,
    read_body,
    read_head,
    same,
)
from kvstore.stream import Stream, WireBrokenError, left_s
from kvstore.tier import (
    MISS,
    WRONG_SIZE,
    Caps,
    Handle,
    Health,
    Outcome,
    Read,
    Write,
    failed,
    hit,
)

WINDOW_BYTES = 16 * 1024 * 1024
READ_ONLY = failed("read_only")


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where another host's kvd serves its blocks."""

    host: str
    port: int

    @classmethod
    def from_url(cls, url: str) -> PeerAddress:
        """`peer://host:port`. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme != "peer" or not parts.hostname or not parts.port or parts.username:
            raise ValueError("a peer's URL is peer://host:port")
        return cls(parts.hostname, parts.port)


def peer_tier(
    address: PeerAddress,
    secret: bytes,
    limits: Limits | None = None,
    tls: ssl.SSLContext | None = None,
) -> PeerTier:
    """With `tls` nothing is said without it. Raises StoreError when the secret is too short to be
    one."""
    if len(secret) < MIN_SECRET_BYTES:
        raise StoreError(f"the peer tier needs a secret of {MIN_SECRET_BYTES} bytes or more")
    caps = Caps(
        name="peer",
        max_value_bytes=MAX_PAYLOAD_BYTES,
        trusted=False,
        shared=True,
    )
    names: list[str] = []
    return PeerTier(caps, partial(_connect, address, secret, tls, names), limits, names)


def _connect(
    address: PeerAddress,
    secret: bytes,
    tls: ssl.SSLContext | None,
    names: list[str],
    deadline: float,
) -> PeerSession:
    session = PeerSession(address, secret, deadline, tls)
    names[:] = [session.store]
    return session


class PeerTier(ConnectorTier):
    """A ConnectorTier that knows what it reaches, once it has reached it."""

    def __init__(
        self,
        caps: Caps,
        connect: Callable[[float], PeerSession],
        limits: Limits | None,
        names: Sequence[str],
    ) -> None:
        """`names`: the store's, as soon as there has been a session."""
        super().__init__(caps, connect, limits)
        self._names = names
        self._meeting: Handle | None = None

    @property
    def store(self) -> str:
        """What routers call the peer's store; empty until it was reached."""
        return next(iter(self._names), "")

    def meet(self) -> None:
        """Reach it if nobody has yet, without waiting: its store has a name then. To be called
        again and again; a peer that is away is tried as seldom as by anybody else."""
        under_way = isinstance(self._meeting, Job) and not self._meeting.ended
        if not self.store and not under_way and self.health() is not Health.OPEN:
            self._meeting = self.get([], time.monotonic() + CONNECT_S)


class PeerSession:
    """One connection, one request at a time; see connector.Session. `store`: its name there."""

    def __init__(
        self,
        address: PeerAddress,
        secret: bytes,
        deadline: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        connected = socket.create_connection((address.host, address.port), left_s(deadline))
        if tls is not None:
            connected = tls.wrap_socket(
                connected, server_hostname=address.host, do_handshake_on_connect=False
            )
        self._stream = Stream(connected, tls is not None)
        self._request = 0
        try:
            if tls is not None:
                self._stream.shake_hands(deadline)
            self._greet(secret, deadline)
        except BaseException:
            self.close()
            raise

    def read(self, reads: Sequence[Read], deadline: float, settle: Settle) -> None:
        """A run is pulled up to its first hole; what lies behind it is missing."""
        for first in range(0, len(reads), MAX_KEYS):
            part = reads[first : first + MAX_KEYS]
            came = self._pull(part, first, deadline, settle)
            if came < len(part):
                for place in range(first + came, len(reads)):
                    settle(place, MISS)
                return

    def write(self, writes: Sequence[Write], deadline: float, settle: Settle) -> None:
        """Refused."""
        for place in range(len(writes)):
            settle(place, READ_ONLY)

    def exists_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """Counted there."""
        count = 0
        for first in range(0, len(keys), MAX_KEYS):
            part = keys[first : first + MAX_KEYS]
            self._request += 1
            self._stream.send([encode(Kind.ASK, self._request, b"".join(part))], deadline)
            frame = self._next(deadline)
            (found,) = NUMBER.unpack(read_body(self._stream, frame, Kind.COUNT, deadline))
            if found > len(part):
                raise WireBrokenError("more blocks than were asked for")
            count += found
            if found < len(part):
                break
        return count

    def delete(self, keys: Sequence[bytes], deadline: float) -> None:
        """Not ours to do."""

    def purge(self, whose: Whose, deadline: float) -> int:
        """Not ours to do."""
        return 0

    def interrupt(self) -> None:
        """Breaks the connection: the server stops, and its leases end."""
        self._stream.interrupt()

    def close(self) -> None:
        """Idempotent."""
        self._stream.close()

    def _greet(self, secret: bytes, deadline: float) -> None:
        client = secrets.token_bytes(NONCE_BYTES)
        self._stream.send([encode(Kind.HELLO, 0, MAGIC + client)], deadline)
        reply = read_body(
            self._stream, read_head(self._stream, deadline), Kind.HELLO_REPLY, deadline
        )
        server, said = reply[:NONCE_BYTES], reply[NONCE_BYTES : NONCE_BYTES + MAC_BYTES]
        if not same(said, proof(secret, b"server", client, server)):
            raise WireBrokenError("a peer without our secret")
        own = proof(secret, b"client", client, server)
        asked = [encode(Kind.PROOF, 0, own), encode(Kind.NAME, 0)]
        self._stream.send(asked, deadline)
        name = read_body(self._stream, read_head(self._stream, deadline), Kind.NAMED, deadline)
        self.store = name.decode(errors="replace")

    def _next(self, deadline: float) -> Frame:
        frame = read_head(self._stream, deadline)
        if frame.request != self._request:
            raise WireBrokenError("an answer to another request")
        return frame

    def _pull(self, reads: Sequence[Read], base: int, deadline: float, settle: Settle) -> int:
        """How many blocks of the run came, all of them in order."""
        self._request += 1
        deadline_ms = max(1, int(1_000 * left_s(deadline)))
        pull = Pull(min(deadline_ms, 0xFFFF_FFFF), WINDOW_BYTES, [read.key for read in reads])
        self._stream.send([encode_pull(self._request, pull)], deadline)
        came = used_bytes = 0
        while (frame := self._next(deadline)).kind is Kind.BLOCK:
            if came == len(reads):
                raise WireBrokenError("more blocks than were asked for")
            outcome, size = self._block(frame, came, reads[came].into, deadline)
            settle(base + came, outcome)
            came += 1
            used_bytes += size
            if used_bytes >= WINDOW_BYTES // 4 and came < len(reads):
                credit = encode(Kind.CREDIT, self._request, NUMBER.pack(used_bytes))
                self._stream.send([credit], deadline)
                used_bytes = 0
        ended = read_body(self._stream, frame, Kind.END, deadline)[0]
        if ended == Ended.EXPIRED:
            raise TimeoutError("the peer's deadline")
        if ended != (Ended.DONE if came == len(reads) else Ended.MISSING):
            raise WireBrokenError("the peer ended the run")
        return came

    def _block(
        self, frame: Frame, index: int, into: memoryview, deadline: float
    ) -> tuple[Outcome, int]:
        head = self._stream.take(BLOCK_HEAD.size, deadline)
        place, header_bytes, payload_bytes = BLOCK_HEAD.unpack(head)
        if place != index:
            raise WireBrokenError("blocks out of order")
        if header_bytes > MAX_HEADER_BYTES:
            raise WireBrokenError("a header that is too long")
        if BLOCK_HEAD.size + header_bytes + payload_bytes != frame.body_bytes:
            raise WireBrokenError("a block of another size than its frame")
        header = self._stream.take(header_bytes, deadline)
        if payload_bytes != len(into):
            self._stream.skip(payload_bytes, deadline)
            return WRONG_SIZE, payload_bytes
        self._stream.receive(into, deadline)
        return hit(header), payload_bytes
