"""Serves the blocks of one host to others: pull only, nothing can be written from outside.

A thread per connection, a bounded number of them. Blocks are leased as far as the reader's credit
goes and sent out of the memory they lie in, so a slow reader holds few of them, and a stalled one
only until its deadline.
"""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from kvstore.errors import StoreError
from kvstore.peer.frames import (
    MAC_BYTES,
    MAGIC,
    MAX_NAME_BYTES,
    MIN_SECRET_BYTES,
    NONCE_BYTES,
    NUMBER,
    SERVED,
    Ended,
    Kind,
    Pull,
    decode_pull,
    encode,
    encode_block,
    proof,
    read_body,
    read_head,
    same,
    split_keys,
)
from kvstore.stream import Stream, WireBrokenError

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
HELLO_S = 2.0
IDLE_S = 600.0
"""After so long without a request the connection is closed; the client opens a new one."""
LONGEST_PULL_S = 60.0
LEASE_BLOCKS = 64
"""Leased at once, at most."""


class Leased(Protocol):
    """One block that stays as it is until it is released."""

    @property
    def header(self) -> bytes:
        """As it was stored."""

    @property
    def payload(self) -> memoryview:
        """In the owner's memory."""


B = TypeVar("B", bound=Leased)


class BlockSource(Protocol[B]):
    """Where the blocks are; several threads call."""

    def lease(self, keys: Sequence[bytes]) -> Sequence[B]:
        """The blocks from the first key on, up to the first one that is not there."""

    def release(self, blocks: Sequence[B]) -> None:
        """Nobody reads them any more."""


class PeerServer(Generic[B]):
    """Between start and close it serves `source` on host:port (0: any free port). With `tls` it
    says nothing without it."""

    def __init__(
        self,
        source: BlockSource[B],
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        name: str = "",
    ) -> None:
        """`name`: what routers call the store. Raises StoreError when the secret is too short to
        be one."""
        if len(secret) < MIN_SECRET_BYTES:
            raise StoreError(f"the peer tier needs a secret of {MIN_SECRET_BYTES} bytes or more")
        self._source = source
        self._secret = secret
        self._host = host
        self.port = port
        self._tls = tls
        self._name = name.encode()[:MAX_NAME_BYTES]
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, Stream] = {}
        self._closed = False

    @property
    def url(self) -> str:
        """Where peers find it; known once started."""
        return f"peer://{self._host}:{self.port}"

    def start(self) -> None:
        """Listens when this returns. Raises StoreError."""
        try:
            self._listener = socket.create_server((self._host, self.port))
        except OSError as error:
            raise StoreError(f"no peer port {self._host}:{self.port}: {error.strerror}") from None
        self.port = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="kv-peer", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Breaks every connection; no block is leased any more when this returns. Idempotent."""
        self._closed = True
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        if self._acceptor is not None:
            self._acceptor.join()
        with self._lock:
            left = dict(self._open)
        for stream in left.values():
            stream.interrupt()
        for thread in left:
            thread.join()

    @property
    def connections(self) -> int:
        """Open now."""
        return len(self._open)

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._closed:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # out of file descriptors: those in use will be given back
                continue
            self._serve_in_thread(connected)

    def _serve_in_thread(self, connected: socket.socket) -> None:
        try:
            stream = self._stream(connected)
        except OSError:
            connected.close()  # it has left already
            return
        thread = threading.Thread(
            target=self._serve, args=(stream,), name="kv-peer-connection", daemon=True
        )
        with self._lock:
            if self._closed or len(self._open) >= MAX_CONNECTIONS:
                stream.close()
                return
            self._open[thread] = stream
        thread.start()

    def _stream(self, connected: socket.socket) -> Stream:
        if self._tls is None:
            return Stream(connected)
        wrapped = self._tls.wrap_socket(connected, server_side=True, do_handshake_on_connect=False)
        return Stream(wrapped, tls=True)

    def _serve(self, stream: Stream) -> None:
        try:
            self._greet(stream)
            while True:
                self._answer(stream)
        except OSError as error:
            log.debug("a peer's connection ended: %s", type(error).__name__)
        except Exception:
            log.exception("a peer's connection failed")
        finally:
            stream.close()
            with self._lock:
                del self._open[threading.current_thread()]

    def _greet(self, stream: Stream) -> None:
        deadline = time.monotonic() + HELLO_S
        if self._tls is not None:
            stream.shake_hands(deadline)
        hello = read_body(stream, read_head(stream, deadline), Kind.HELLO, deadline)
        if hello[: len(MAGIC)] not in SERVED:
            raise WireBrokenError("another protocol")
        client, server = hello[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
        own = proof(self._secret, b"server", client, server)
        stream.send([encode(Kind.HELLO_REPLY, 0, server + own)], deadline)
        said = read_body(stream, read_head(stream, deadline), Kind.PROOF, deadline)
        if not same(said[:MAC_BYTES], proof(self._secret, b"client", client, server)):
            raise WireBrokenError("a peer without our secret")

    def _answer(self, stream: Stream) -> None:
        deadline = time.monotonic() + IDLE_S
        frame = read_head(stream, deadline)
        if frame.kind in (Kind.CREDIT, Kind.CANCEL):
            # Crossed the END of its request on the way.
            read_body(stream, frame, frame.kind, deadline)
        elif frame.kind is Kind.NAME:
            stream.send([encode(Kind.NAMED, frame.request, self._name)], deadline)
        elif frame.kind is Kind.ASK:
            keys = split_keys(read_body(stream, frame, Kind.ASK, deadline))
            count = NUMBER.pack(self._count(keys))
            stream.send([encode(Kind.COUNT, frame.request, count)], deadline)
        else:
            pull = decode_pull(read_body(stream, frame, Kind.PULL, deadline))
            _Sending(self._source, stream, frame.request, pull).run()

    def _count(self, keys: Sequence[bytes]) -> int:
        count = 0
        while count < len(keys):
            part = keys[count : count + LEASE_BLOCKS]
            blocks = self._source.lease(part)
            self._source.release(blocks)
            count += len(blocks)
            if len(blocks) < len(part):
                break
        return count


class _Sending(Generic[B]):
    """One PULL: its blocks in order, within the credit, and one END."""

    def __init__(self, source: BlockSource[B], stream: Stream, request: int, pull: Pull) -> None:
        self._source = source
        self._stream = stream
        self._request = request
        self._keys = pull.keys
        self._credit = pull.window_bytes
        self._window = pull.window_bytes
        self._usual_bytes = pull.window_bytes
        self._cancelled = False
        self._deadline = time.monotonic() + min(pull.deadline_ms / 1_000, LONGEST_PULL_S)

    def run(self) -> None:
        """Raises OSError when the connection is of no use any more."""
        at, ended = 0, None
        while ended is None:
            ended = self._may_go_on()
            if ended is None:
                sent, ended = self._send_some(at)
                at += sent
            if ended is None and at == len(self._keys):
                ended = Ended.DONE
        end = encode(Kind.END, self._request, bytes([ended]))
        self._stream.send([end], max(self._deadline, time.monotonic() + HELLO_S))

    def _may_go_on(self) -> Ended | None:
        """Hears what the reader says, and waits for credit; nothing is leased meanwhile."""
        while not self._cancelled and (self._credit <= 0 or self._stream.waiting()):
            try:
                self._hear()
            except TimeoutError:
                return Ended.EXPIRED
        if self._cancelled:
            return Ended.CANCELLED
        return Ended.EXPIRED if time.monotonic() >= self._deadline else None

    def _hear(self) -> None:
        frame = read_head(self._stream, self._deadline)
        if frame.kind not in (Kind.CREDIT, Kind.CANCEL):
            raise WireBrokenError("a second request at once")
        body = read_body(self._stream, frame, frame.kind, self._deadline)
        if frame.request != self._request:
            return
        if frame.kind is Kind.CANCEL:
            self._cancelled = True
        else:
            self._credit = min(self._window, self._credit + NUMBER.unpack(body)[0])

    def _send_some(self, first: int) -> tuple[int, Ended | None]:
        """As many blocks as the credit allows, the last one may go beyond it."""
        most = max(1, min(LEASE_BLOCKS, self._credit // self._usual_bytes))
        wanted = self._keys[first : first + most]
        blocks = self._source.lease(wanted)
        try:
            for place, block in enumerate(blocks):
                size = len(block.payload)
                head = encode_block(self._request, first + place, block.header, size)
                self._stream.send([head, block.payload], self._deadline)
                self._credit -= size
                self._usual_bytes = max(1, size)
        finally:
            self._source.release(blocks)
        return len(blocks), Ended.MISSING if len(blocks) < len(wanted) else None
