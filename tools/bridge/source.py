"""The ZMQ side of the bridge: live events, and the engine's own replay of those that were missed.

Only decodes frames; what they mean is the cache's to know. Nothing is sent but a replay's request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from events.kvevents import END_OF_REPLAY, MAX_KV_BATCH_BYTES, SEQ_BYTES

REPLAY_MESSAGE_S = 2.0
"""vLLM's publisher looks at its replay socket at least every 100 ms."""

QUEUED_MESSAGES = 100_000

Message = tuple[int, bytes]
"""(number, payload)."""


class EngineGoneError(Exception):
    """The connection to the engine's publisher broke: what it holds by now is unknown."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses to connect to; `replay` is empty where the engine offers none. `awaited`: the
    engine itself connects to the address of the events, so it is ours to listen there."""

    events: str
    replay: str = ""
    awaited: bool = False


class EventSource:
    """One connection to one engine. Use as an async context manager."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.malformed = 0
        self._endpoints = endpoints
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket
        self._monitor: zmq.asyncio.Socket

    async def __aenter__(self) -> EventSource:
        self._socket = self._new(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._open(self._endpoints)
        return self

    def _open(self, endpoints: Endpoints) -> None:
        if endpoints.awaited:
            try:
                self._socket.bind(endpoints.events)
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
        # Whoever listens there already is taken for the engine.
        self._socket.connect(endpoints.events)

    async def __aexit__(self, *_: object) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.destroy(linger=0)

    @property
    def address(self) -> str:
        """Where the events come from."""
        return self._endpoints.events

    async def connected(self) -> None:
        """Until the publisher is reached: what it says from now on is heard."""
        await self._until(zmq.EVENT_HANDSHAKE_SUCCEEDED)

    async def live(self) -> AsyncIterator[Message]:
        """What comes. Raises EngineGoneError when the connection breaks."""
        gone = asyncio.create_task(self._until(zmq.EVENT_DISCONNECTED))
        try:
            while True:
                frames = asyncio.ensure_future(self._socket.recv_multipart())
                await asyncio.wait({frames, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not frames.done():
                    frames.cancel()
                    await asyncio.gather(frames, return_exceptions=True)
                    raise EngineGoneError
                message = self._message(frames.result())
                if message is not None:
                    yield message
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def replay(self, first: int) -> AsyncIterator[Message]:
        """The messages that the engine still has, from `first` on; ends early when it is silent."""
        if not self._endpoints.replay:
            return
        socket = self._new(zmq.DEALER)
        try:
            socket.connect(self._endpoints.replay)
            await socket.send_multipart([b"", first.to_bytes(SEQ_BYTES, "big")])
            with contextlib.suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(REPLAY_MESSAGE_S):
                        frames = await socket.recv_multipart()
                    if len(frames) > 1 and frames[-2] == END_OF_REPLAY:
                        return
                    message = self._message(frames)
                    if message is not None:
                        yield message
        finally:
            socket.close(linger=0)

    def _new(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_KV_BATCH_BYTES)
        socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    def _message(self, frames: list[bytes]) -> Message | None:
        """The last two frames are number and payload, whatever comes before them."""
        if len(frames) < 2 or len(frames[-2]) != SEQ_BYTES:
            self.malformed += 1
            return None
        return int.from_bytes(frames[-2], "big"), frames[-1]

    async def _until(self, event: int) -> None:
        while (await recv_monitor_message(self._monitor))["event"] != event:
            pass
