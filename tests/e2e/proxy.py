"""A TCP proxy that loses connections, and with them what is on its way in both directions."""

from __future__ import annotations

import asyncio
import random


class LossyProxy:
    """Use as an async context manager. Each connection breaks after a random number of bytes from
    `cut_bytes`; None for one that stays. Nothing passes while `flows` is not set."""

    def __init__(self, port: int, cut_bytes: tuple[int, int] | None, seed: int = 0) -> None:
        self.cut_bytes = cut_bytes
        self.cuts = 0
        self.flows = asyncio.Event()
        self.flows.set()
        self.port = 0
        self._upstream = port
        self._random = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> LossyProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Break every connection now."""
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        ends = {writer, up_writer}
        self._open |= ends
        left = [self._random.randint(*self.cut_bytes) if self.cut_bytes else -1]
        pumps = [
            asyncio.create_task(self._pump(reader, up_writer, left)),
            asyncio.create_task(self._pump(up_reader, writer, left)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.cuts += 1
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in ends:
                end.transport.abort()
            self._open -= ends
            self._tasks.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: list[int]
    ) -> None:
        """Until the end, or until what both directions have left is used up."""
        while data := await reader.read(1024):
            await self.flows.wait()
            if 0 <= left[0] < len(data):
                writer.write(data[: left[0]])
                return
            left[0] -= len(data) if left[0] > 0 else 0
            writer.write(data)
            await writer.drain()
