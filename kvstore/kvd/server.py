"""The daemon's loop: who comes in, what is over, what must not go on."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from functools import partial
from typing import Any

from kvstore.arena.arena import Arena
from kvstore.arena.slot import Session
from kvstore.errors import StoreError
from kvstore.kvd.connection import Connection, may_connect
from kvstore.kvd.messages import Report

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
TICK_S = 0.05


class KvdServer:
    """Serves `arena` on `listener` until `close`, or until its own books are wrong: then `failed`
    says why, and the process must not go on."""

    def __init__(self, arena: Arena, listener: socket.socket, boot: int) -> None:
        self.boot = boot
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._arena = arena
        self._listener = listener
        self._began = time.monotonic()
        self._connections: set[Connection] = set()
        self._gone = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Accept from now on."""
        self._listener.setblocking(False)
        for task in (self._accept(), self._tick()):
            self._tasks.append(asyncio.create_task(task))
            self._tasks[-1].add_done_callback(self._task_ended)

    async def close(self) -> None:
        """Hang up on everybody. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()
        for connection in list(self._connections):
            connection.close()
        if self._connections:
            self._gone.clear()
            await self._gone.wait()

    def report(self) -> Report:
        """The daemon's figures."""
        return Report(self.boot, time.monotonic() - self._began, self._arena.stats())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            peer, _ = await loop.sock_accept(self._listener)
            if len(self._connections) >= MAX_CONNECTIONS or not may_connect(peer):
                peer.close()
                continue
            connection = Connection(
                self._arena,
                self.boot,
                peer.dup(),
                self.report,
                self._fail,
                self._ended,
            )
            self._connections.add(connection)
            try:
                await loop.connect_accepted_socket(partial(_itself, connection), peer)
            except OSError:
                connection.connection_lost(None)
                peer.close()

    def _ended(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._gone.set()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            overdue = self._arena.tick()
            for connection in list(self._connections):
                connection.tell_changes()
                if _is_one_of(connection.session, overdue):
                    connection.refuse("overdue")
                elif connection.overslept(loop.time()):
                    connection.refuse("unfinished")

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        log.error("kvd can't go on", exc_info=error)
        if not self.failed.done():
            self.failed.set_result(error)


def _itself(connection: Connection) -> Connection:
    return connection


def _is_one_of(session: Session | None, sessions: list[Session]) -> bool:
    return session is not None and session in sessions


async def serve(arena: Arena, listener: socket.socket, boot: int, stop: asyncio.Event) -> None:
    """Until `stop`. Raises StoreError when the arena's books are wrong."""
    server = KvdServer(arena, listener, boot)
    server.start()
    stopping = asyncio.create_task(stop.wait())
    try:
        ends: list[asyncio.Future[Any]] = [stopping, server.failed]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        await server.close()
    if server.failed.done():
        raise StoreError(f"kvd ends: {server.failed.result()}")
