"""What no gateway can do without: bytes from a client's socket to a worker's and back, on one event
loop, none of them looked at: `python -m tools.bench.gateway.floor PORT...`.
"""

from __future__ import annotations

import asyncio
import itertools
import sys

import uvloop


class Side(asyncio.Protocol):
    """One end of a pair of connections."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: Side | None = None
        self._early = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self._early += data
        else:
            self.other.transport.write(data)

    def join(self, other: Side) -> None:
        """What came before goes there, and whatever comes."""
        self.other, other.other = other, self
        early, self._early = self._early, b""
        if early:
            self.data_received(early)


async def serve(workers: list[int]) -> None:
    """Each client's connection has one of its own to a worker, these in turn."""
    loop, ports, joining = asyncio.get_running_loop(), itertools.cycle(workers), set()

    async def join(client: Side) -> None:
        _, worker = await loop.create_connection(Side, "127.0.0.1", next(ports))
        client.join(worker)

    def accept() -> Side:
        client = Side()
        task = loop.create_task(join(client))
        joining.add(task)
        task.add_done_callback(joining.discard)
        return client

    server = await loop.create_server(accept, "127.0.0.1", 0)
    print("READY", server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(list(map(int, sys.argv[1:]))))
