"""A host that serves blocks to peers, as a process of its own; told what it holds over stdin."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from configs.schema import TlsConfig
from events.tls import server_context
from kvstore.peer.server import PeerServer


@dataclass(frozen=True, slots=True)
class Held:
    header: bytes
    payload: memoryview


class Shelf:
    """Blocks by key; counts what is leased."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, Held] = {}
        self.leased = 0
        self._lock = Lock()

    def lease(self, keys: Sequence[bytes]) -> list[Held]:
        found = []
        for key in keys:
            block = self.blocks.get(key)
            if block is None:
                break
            found.append(block)
        with self._lock:
            self.leased += len(found)
        return found

    def release(self, blocks: Sequence[Held]) -> None:
        with self._lock:
            self.leased -= len(blocks)


def main(port: int, secret: bytes, papers: TlsConfig | None) -> None:
    shelf = Shelf()
    tls = None if papers is None else server_context(papers)
    server = PeerServer(shelf, secret, port=port, tls=tls)
    server.start()
    print(server.port, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        key = bytes.fromhex(order.get("key", ""))
        if order["do"] == "put":
            payload = memoryview(base64.b64decode(order["payload"]))
            shelf.blocks[key] = Held(base64.b64decode(order["header"]), payload)
        elif order["do"] == "drop":
            shelf.blocks.pop(key, None)
        print(json.dumps({"leased": shelf.leased, "open": server.connections}), flush=True)
    server.close()


if __name__ == "__main__":
    _, PORT, SECRET, *FILES = sys.argv
    PAPERS = TlsConfig(cert=FILES[0], key=FILES[1], ca=FILES[2]) if FILES else None
    main(int(PORT), bytes.fromhex(SECRET), PAPERS)
