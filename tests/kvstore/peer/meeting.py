"""A peer and who meets it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence

from kvstore.peer import frames
from kvstore.peer.client import PeerAddress, PeerSession
from kvstore.peer.frames import Kind
from kvstore.peer.server import PeerServer
from kvstore.stream import Stream
from tests.kvstore.conformance.backend import HOST
from tests.kvstore.conformance.blocks import Block
from tests.kvstore.conformance.peer_child import Held, Shelf

SECRET = bytes(range(100, 132))
KEYS = [bytes([number]) * 16 for number in range(1, 4)]


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def fill(shelf: Shelf, blocks: Sequence[Block]) -> None:
    for block in blocks:
        shelf.blocks[block.key] = Held(block.header, memoryview(block.payload))


def session(server: PeerServer[Held], secret: bytes = SECRET) -> PeerSession:
    return PeerSession(PeerAddress(HOST, server.port), secret, soon())


def scripted(answers: Callable[[Stream], None]) -> tuple[int, threading.Thread]:
    """A server that holds the secret and then answers as it likes, once."""
    listener = socket.create_server((HOST, 0))

    def serve() -> None:
        peer, _ = listener.accept()
        listener.close()
        stream = Stream(peer)
        hello = frames.read_body(stream, frames.read_head(stream, soon()), Kind.HELLO, soon())
        client, own = hello[8:], b"n" * 16
        reply = own + frames.proof(SECRET, b"server", client, own)
        stream.send([frames.encode(Kind.HELLO_REPLY, 0, reply)], soon())
        frames.read_body(stream, frames.read_head(stream, soon()), Kind.PROOF, soon())
        frames.read_body(stream, frames.read_head(stream, soon()), Kind.NAME, soon())
        stream.send([frames.encode(Kind.NAMED, 0, b"scripted")], soon())
        pull = frames.read_head(stream, soon())
        stream.skip(pull.body_bytes, soon())
        answers(stream)
        stream.close()

    thread = threading.Thread(target=serve)
    thread.start()
    return listener.getsockname()[1], thread
