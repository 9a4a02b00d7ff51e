"""The other process: one replica that speaks the link, and the clients that read its answers.

It is made cheap, not real: frames are encoded once, clients only count bytes, so that one core can
keep a router busy. It answers its parent's words one by one over a pipe.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from multiprocessing.connection import Connection

import uvloop
from aiohttp import WSMsgType, web

from events.output import CoreDelta, CoreFinish, LinkWelcome, StepFrame, Usage
from events.request import LINK_VERSION, CoreRequest
from events.wire import decode_router_frame, encode

REPLICA = "bench-0"
FRAME_DELTAS = 256
MARK = "~"
TEXT = f" toke{MARK}"
"""Counted by its mark: nothing else in an answer has it, and no boundary can split it."""

_END = b"\r\n0\r\n\r\n"
_OPENING = 64
OPEN_S = 20.0


class _Client(asyncio.Protocol):
    """One streaming request; `done` is set by the terminating chunk."""

    def __init__(self, body: bytes) -> None:
        self.deltas = 0
        self.events = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.more = asyncio.Event()
        self._body = body
        self._begun = False
        self._tail = b""

    def connection_made(self, transport: asyncio.Transport) -> None:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        transport.write(head % len(self._body) + self._body)

    def data_received(self, data: bytes) -> None:
        if not self._begun and not data.startswith(b"HTTP/1.1 200 "):
            self.done.set_exception(ConnectionError(f"refused: {data[:12]!r}"))
        self._begun = True
        self.deltas += data.count(MARK.encode())
        self.events += data.count(b"data: ")
        self.more.set()
        self._tail = (self._tail + data)[-len(_END) :]
        if self._tail == _END and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the answer was cut off"))

    async def wait_deltas(self, count: int) -> None:
        """Until so many deltas have come, in however many events."""
        while self.deltas < count:
            if self.done.done():
                self.done.result()
                raise ConnectionError(f"the answer ended after {self.deltas} deltas")
            self.more.clear()
            await self.more.wait()


def _delta(request: CoreRequest, finish: CoreFinish | None) -> CoreDelta:
    usage = Usage(10, 0, 10)
    return CoreDelta(request.request_id, request.attempt, 0, TEXT, (40,), (), usage, finish)


def _frames(deltas: Sequence[CoreDelta]) -> list[bytes]:
    return [
        encode(StepFrame(deltas=tuple(deltas[at : at + FRAME_DELTAS])))
        for at in range(0, len(deltas), FRAME_DELTAS)
    ]


class Peer:
    """Replica and clients in one loop."""

    def __init__(self, streams: int, boot: int) -> None:
        self._streams = streams
        self._boot = boot
        self._requests: list[CoreRequest] = []
        self._socket = web.WebSocketResponse(max_msg_size=0)
        self._clients: list[_Client] = []
        self._servers: list[asyncio.Server] = []

    async def listen(self) -> int:
        """Wait for the router's link; the port."""
        app = web.Application()
        app.router.add_get("/link", self._link)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner.addresses[0][1]

    async def open(self, port: int) -> None:
        """All streams open, the first delta of each read."""
        loop = asyncio.get_running_loop()
        message = {"role": "user", "content": "hi"}
        fields = {"model": "bench", "messages": [message], "stream": True, "max_tokens": 64}
        body = json.dumps(fields).encode()
        for at in range(0, self._streams, _OPENING):
            for _ in range(min(_OPENING, self._streams - at)):
                make = loop.create_connection(lambda: _Client(body), "127.0.0.1", port)
                self._clients.append((await make)[1])
            async with asyncio.timeout(OPEN_S):
                await self._read(1)

    async def relay(self, steps: int, every_s: float) -> int:
        """Send `steps` deltas to each stream, one step per `every_s`, until all of it is read.
        Returns in how many events that was."""
        loop = asyncio.get_running_loop()
        frames = self._encoded()
        wanted = self._clients[0].deltas + steps
        before = sum(client.events for client in self._clients)
        started_s = loop.time()
        for step in range(steps):
            await asyncio.sleep(max(0.0, started_s + step * every_s - loop.time()))
            await self._step(frames)
        await self._read(wanted)
        return sum(client.events for client in self._clients) - before

    async def swallow(self) -> int:
        """Read whatever comes to the port that is returned."""
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """End every answer cleanly."""
        await self._step(self._encoded(CoreFinish(reason="stop")))
        await asyncio.gather(*(client.done for client in self._clients))

    def _encoded(self, finish: CoreFinish | None = None) -> list[bytes]:
        return _frames([_delta(request, finish) for request in self._requests])

    async def _step(self, frames: list[bytes]) -> None:
        for frame in frames:
            await self._socket.send_bytes(frame)

    async def _read(self, deltas: int) -> None:
        for client in self._clients:
            await client.wait_deltas(deltas)

    async def _link(self, request: web.Request) -> web.WebSocketResponse:
        await self._socket.prepare(request)
        await self._socket.receive()
        welcome = LinkWelcome(version=LINK_VERSION, replica=REPLICA, boot=self._boot)
        await self._socket.send_bytes(encode(welcome))
        async for message in self._socket:
            if message.type is WSMsgType.BINARY:
                await self._heed(decode_router_frame(message.data))
        return self._socket

    async def _heed(self, frame: object) -> None:
        """The first delta comes at once: no replica gets much more before it."""
        if isinstance(frame, CoreRequest):
            self._requests.append(frame)
            await self._step(_frames([_delta(frame, None)]))


async def _serve(words: Connection, streams: int, boot: int) -> None:
    loop = asyncio.get_running_loop()
    peer = Peer(streams, boot)
    words.send(await peer.listen())
    while (word := await loop.run_in_executor(None, words.recv)) is not None:
        name, *given = word
        async with asyncio.timeout(300):
            words.send(await getattr(peer, name)(*given))


def run(words: Connection, streams: int, boot: int) -> None:
    """The process: says its link's port, then does as told until told None."""
    uvloop.run(_serve(words, streams, boot))
