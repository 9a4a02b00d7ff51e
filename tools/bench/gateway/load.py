"""The clients, in a process of their own: `python -m tools.bench.gateway.load`.

Each connection keeps one request under way (closed loop). One line of JSON at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import uvloop

from tools.bench.gateway.prompts import SIZES, requests, templates

_LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(slots=True)
class Counts:
    """What came back. Times in ms, from the request's last byte to the first event with text (of a
    stream) or to the end (of a plain answer)."""

    wanted: int
    requests: int = 0
    chunks: int = 0
    errors: list[str] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    def fail(self, error: str) -> None:
        """Note it; there is no point in going on."""
        self.errors.append(error)
        self.enough.set()

    def end(self) -> None:
        """One more answer is whole."""
        self.requests += 1
        if self.requests == self.wanted:
            self.enough.set()


class Client(asyncio.Protocol):
    """One connection: asks, reads, asks again, until told to stop."""

    def __init__(self, bodies: Iterator[bytes], counts: Counts, stream: bool) -> None:
        self.stopped = False
        self.idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._bodies = bodies
        self._counts = counts
        self._stream = stream
        self._transport: asyncio.Transport
        self._data = bytearray()
        self._wanted = -1
        self._started_s = 0.0
        self._first = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.idle.done():
            self._counts.fail(f"connection lost: {error}")
            self.idle.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._stream:
            self._note_events(data)
        self._data += data
        if self._complete():
            self._note_end()
            if self.stopped:
                self.idle.set_result(None)
                self._transport.close()
            else:
                self._ask()

    def _ask(self) -> None:
        self._data.clear()
        self._wanted = -1
        self._first = True
        body = next(self._bodies)
        self._started_s = time.perf_counter()
        self._transport.write(body)

    def _note_end(self) -> None:
        if not self._stream:
            self._note_time()
        if not self._data.startswith(b"HTTP/1.1 200"):
            self._counts.fail(bytes(self._data[:300]).decode(errors="replace"))
        self._counts.end()

    def _note_events(self, data: bytes) -> None:
        events = data.count(b'"content":"') - data.count(b'"content":""')
        self._counts.chunks += events
        if events and self._first:
            self._first = False
            self._note_time()

    def _note_time(self) -> None:
        self._counts.times_ms.append(1e3 * (time.perf_counter() - self._started_s))

    def _complete(self) -> bool:
        if self._wanted < 0:
            head, found, _ = self._data.partition(b"\r\n\r\n")
            if not found:
                return False
            lower = bytes(head).lower()
            self._wanted = 0
            if b"content-length:" in lower:
                length = lower.split(b"content-length:")[1].split(b"\r\n")[0]
                self._wanted = len(head) + 4 + int(length)
        if self._wanted:
            return len(self._data) >= self._wanted
        return self._data.endswith(_LAST_CHUNK)


async def run(flags: argparse.Namespace) -> Counts:
    """Open the connections, let them run, close them."""
    loop = asyncio.get_running_loop()
    counts = Counts(flags.requests)
    bodies = requests(templates(SIZES[flags.size], flags.stream, flags.max_tokens))
    for _ in range(flags.skip):
        next(bodies)
    made = [
        await loop.create_connection(
            lambda: Client(bodies, counts, flags.stream), flags.host, flags.port
        )
        for _ in range(flags.connections)
    ]
    clients = [client for _, client in made]
    with suppress(TimeoutError):
        async with asyncio.timeout(None if flags.requests else flags.seconds):
            await counts.enough.wait()
    for client in clients:
        client.stopped = True
    await asyncio.wait([client.idle for client in clients], timeout=20)
    return counts


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--size", choices=sorted(SIZES), required=True)
    parser.add_argument("--connections", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--requests", type=int, default=0, help="so many, instead of a time")
    parser.add_argument("--skip", type=int, default=0, help="leave the first tails to others")
    parser.add_argument("--max-tokens", type=int, default=1)
    parser.add_argument("--stream", action="store_true")
    flags = parser.parse_args()
    started_s = time.perf_counter()
    counts = uvloop.run(run(flags))
    found = {
        "requests": counts.requests,
        "chunks": counts.chunks,
        "seconds": time.perf_counter() - started_s,
        "times_ms": sorted(counts.times_ms),
        "errors": len(counts.errors),
        "first_error": counts.errors[0] if counts.errors else None,
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
