"""The ZMQ side: numbered batches to subscribers, and those that somebody missed, on request.

As in vLLM's own publisher: frames (topic, number, payload), numbers from 0 per life of the replica,
a bounded buffer behind a ROUTER socket. Token ids are in clear, so only this machine may listen.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections import deque

import zmq
import zmq.asyncio

from configs.load import ConfigError
from events.kvevents import END_OF_REPLAY, SEQ_BYTES, encode_batch
from replica.kv_events.log import KvEventLog

log = logging.getLogger(__name__)

TICK_S = 0.02
BATCH_EVENTS = 4_096
KEPT_BATCHES = 10_000
KEPT_BYTES = 64 * 1024 * 1024
TOPIC = b""


def check_address(address: str) -> str:
    """The address itself. Raises ConfigError where others than this machine could listen."""
    scheme, _, rest = address.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if scheme == "ipc" and rest:
        return address
    with contextlib.suppress(ValueError):
        if scheme == "tcp" and ipaddress.ip_address(host).is_loopback:
            return address
    raise ConfigError(f"kv_events: {address!r} is neither tcp://127.0.0.1:port nor ipc://path")


class KvEventPublisher:
    """Made and used on the event loop. `number` is that of the next batch."""

    def __init__(self, changes: KvEventLog, address: str, replay_address: str = "") -> None:
        """Raises ConfigError on an address that is not of this machine, or can't be bound."""
        self.number = 0
        self._changes = changes
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._context = zmq.asyncio.Context()
        self._live = self._bind(zmq.PUB, address)
        self._replay = self._bind(zmq.ROUTER, replay_address) if replay_address else None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Publish from now on; what the log holds already goes out first."""
        self._tasks.append(asyncio.create_task(self._publish_forever()))
        if self._replay is not None:
            self._tasks.append(asyncio.create_task(self._serve(self._replay)))

    async def close(self) -> None:
        """Fall silent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    def address(self) -> str:
        """Where events are, once bound."""
        return self._live.getsockopt_string(zmq.LAST_ENDPOINT)

    def replay_address(self) -> str:
        """Where they are replayed; empty where they are not."""
        return self._replay.getsockopt_string(zmq.LAST_ENDPOINT) if self._replay else ""

    async def _publish_forever(self) -> None:
        while True:
            events = self._changes.drain()
            for start in range(0, len(events), BATCH_EVENTS):
                await self._send(encode_batch(time.time(), events[start : start + BATCH_EVENTS]))
            await asyncio.sleep(TICK_S)

    async def _send(self, payload: bytes) -> None:
        self._keep(payload)
        frames = [TOPIC, self.number.to_bytes(SEQ_BYTES, "big"), payload]
        self.number += 1
        await self._live.send_multipart(frames)

    def _keep(self, payload: bytes) -> None:
        self._kept.append((self.number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    async def _serve(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != SEQ_BYTES:
                continue
            first = int.from_bytes(frames[2], "big")
            try:
                for number, payload in [kept for kept in self._kept if kept[0] >= first]:
                    numbered = number.to_bytes(SEQ_BYTES, "big")
                    await socket.send_multipart([frames[0], b"", TOPIC, numbered, payload])
                await socket.send_multipart([frames[0], b"", TOPIC, END_OF_REPLAY, b""])
            except zmq.ZMQError as error:
                log.warning("a replay of KV events broke off: %s", error)

    def _bind(self, kind: int, address: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, KEPT_BATCHES)
        socket.setsockopt(zmq.MAXMSGSIZE, KEPT_BYTES)
        try:
            socket.bind(check_address(address))
        except (zmq.ZMQError, ConfigError) as error:
            self._context.destroy(linger=0)
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"kv_events: {address} can't be used: {error}") from None
        return socket
