"""Forks hosts that serve blocks to peers, one for each line on stdin, and says their pids: a fresh
interpreter for each takes too long to kill fifty."""

from __future__ import annotations

import os
import signal
import sys
import time

from kvstore.peer.server import PeerServer
from tests.kvstore.conformance.blocks import LARGE, chain_of
from tests.kvstore.conformance.peer_child import Held, Shelf


def serve(port: int, secret: bytes, shelf: Shelf) -> None:
    server = PeerServer(shelf, secret, port=port)
    server.start()
    os.write(1, f"{os.getpid()}\n".encode())
    time.sleep(60)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    shelf = Shelf()
    for block in chain_of(12, 5, kv=LARGE):
        shelf.blocks[block.key] = Held(block.header, memoryview(block.payload))
    for _ in sys.stdin:
        if os.fork() == 0:
            try:
                serve(int(sys.argv[1]), bytes.fromhex(sys.argv[2]), shelf)
            finally:
                os._exit(1)
