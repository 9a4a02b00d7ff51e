"""A small OpenAI-compatible server of another kind, told what to do: a raw asyncio one, so that it
can break in every way that a real one can."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 3,
    "total_tokens": 43,
    "prompt_tokens_details": {"cached_tokens": 32},
}


class Asked:
    """One request as the script sees it."""

    def __init__(self, path: str, headers: dict[str, str], body: bytes, server: ForeignServer):
        self.path = path
        self.headers = headers
        self.raw = body
        self.server = server
        self.gone = asyncio.Event()
        self._writer: asyncio.StreamWriter

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)

    async def head(self, status: int = 200, kind: str = "text/event-stream") -> None:
        """Status line and headers of a chunked answer."""
        self._writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        await self._writer.drain()

    async def chunk(self, data: bytes) -> None:
        """One piece of the body."""
        self._writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self._writer.drain()

    async def event(self, value: Any) -> None:
        """One server-sent event."""
        await self.chunk(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")

    async def done(self) -> None:
        """[DONE] and the end of the body."""
        await self.chunk(b"data: [DONE]\n\n")
        await self.end()

    async def end(self) -> None:
        """The end of the body: what a FIN without [DONE] looks like where nothing went before."""
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    def cut(self) -> None:
        """Reset the connection."""
        self._writer.transport.abort()

    async def plain(self, status: int, value: Any, **headers: str) -> None:
        """A whole answer with its length."""
        body = json.dumps(value).encode()
        lines = "".join(f"{name.replace('_', '-')}: {text}\r\n" for name, text in headers.items())
        self._writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{lines}"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await self._writer.drain()


Script = Callable[[Asked], Awaitable[None]]


def piece(text: str, finish: str | None = None) -> dict[str, Any]:
    """One chunk of a chat stream."""
    delta = {"content": text} if text else {}
    return {
        "id": "chatcmpl-f",
        "object": "chat.completion.chunk",
        "model": "up",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }


async def answer(asked: Asked) -> None:
    """What a healthy one says, streamed or not."""
    if not asked.body.get("stream"):
        message = {"role": "assistant", "content": "one two three"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        await asked.plain(200, {"id": "f", "choices": [choice], "usage": USAGE})
        return
    await asked.head()
    for word in ("one", " two", " three"):
        await asked.event(piece(word))
    await asked.event(piece("", "stop"))
    if (asked.body.get("stream_options") or {}).get("include_usage"):
        await asked.event({"id": "chatcmpl-f", "choices": [], "usage": USAGE})
    await asked.done()


async def silent(asked: Asked) -> None:
    """Never answer."""
    await asked.gone.wait()


def refuse(status: int) -> Script:
    """Always that status."""

    async def script(asked: Asked) -> None:
        await asked.plain(status, {"error": {"message": "no", "type": "x", "code": None}})

    return script


class ForeignServer:
    """Use as an async context manager. `asked` are the POSTs so far; `health` is what GETs get,
    None for no answer at all."""

    def __init__(self, script: Script = answer) -> None:
        self.script = script
        self.health: int | None = 200
        self.health_path = "/health"
        self.more: dict[str, Any] = {}
        self.asked: list[Asked] = []
        self.probes: list[str] = []
        self.connections = 0
        self.open = 0
        self.close_idle_after: int | None = None
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ForeignServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def die(self) -> None:
        """As after kill -9."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        task = asyncio.current_task()
        self._serving.add(task)
        served = 0
        try:
            while (request := await self._read(reader)) is not None:
                if self.close_idle_after is not None and served >= self.close_idle_after:
                    # As a server does whose idle limit ran out while the request was on its way.
                    return
                method, asked = request
                asked._writer = writer
                served += 1
                await (self._get(asked) if method == "GET" else self._post(asked, reader))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            self._serving.discard(task)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> tuple[str, Asked] | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        first, *lines = head.decode().rstrip().split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        method, path, _ = first.split(" ")
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return method, Asked(path, headers, body, self)

    async def _get(self, asked: Asked) -> None:
        self.probes.append(asked.path)
        if asked.path in self.more:
            await asked.plain(200, self.more[asked.path])
        elif self.health is None:
            await asyncio.sleep(3600)
        else:
            await asked.plain(self.health if asked.path == self.health_path else 404, {})

    async def _post(self, asked: Asked, reader: asyncio.StreamReader) -> None:
        self.asked.append(asked)
        self.open += 1
        script = asyncio.ensure_future(self.script(asked))
        # Nothing is pipelined here: whatever comes now is the end of the connection.
        ended = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({script, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not script.done():
                asked.gone.set()
                script.cancel()
            await asyncio.gather(script, return_exceptions=True)
        finally:
            self.open -= 1
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)
