"""What a scripted replica does with one request: a script is an async function of one `Call`; it
may answer, wait, break the connection, or answer after the abort."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from events.errors import CoreError
from events.output import CoreDelta, CoreFinish, StepFrame, TokenLogprob, Usage
from events.request import CoreRequest
from events.wire import encode

if TYPE_CHECKING:
    from tests.fakes.replica import FakeReplica

BLOCK_TOKENS = 16


class Call:
    """One submitted attempt as the script sees it."""

    def __init__(self, replica: FakeReplica, ws: web.WebSocketResponse, request: CoreRequest):
        self.replica = replica
        self.ws = ws
        self.request = request
        self.aborted = asyncio.Event()
        self.held = asyncio.Event()
        self.resumed = asyncio.Event()
        self.sent_tokens = 0
        self._carried = {
            child: len(progress.output) // 4 for child, progress in enumerate(request.progress)
        }

    @property
    def continuing(self) -> bool:
        """Whether another replica has delivered a part of the answer."""
        return bool(self.request.progress)

    @property
    def open_children(self) -> list[int]:
        """The children that are to be answered."""
        progress = self.request.progress
        return [
            i for i in range(self.request.sampling.n) if not (progress and progress[i].finished)
        ]

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt) // 4

    async def send(
        self,
        text: str = "",
        ids: Sequence[int] | None = None,
        *,
        child: int = 0,
        finish: str | None = None,
        error: CoreError | None = None,
        cached: int = 0,
        attempt: int | None = None,
        written: int = 0,
    ) -> None:
        """One StepFrame with one delta; `ids` default to one id per text."""
        tokens = tuple(ids if ids is not None else ([1] if text else []))
        self.sent_tokens += len(tokens)
        wanted = self.request.sampling.logprobs
        logprobs = tuple(TokenLogprob(i, -0.5, ((i, -0.5),)[: wanted or 0]) for i in tokens)
        delta = CoreDelta(
            self.request.request_id,
            self.request.attempt if attempt is None else attempt,
            child,
            text,
            tokens,
            logprobs if wanted is not None else (),
            Usage(self.prompt_tokens, cached, self._carried.get(child, 0) + self.sent_tokens),
            CoreFinish(reason=finish, error=error, written_blocks=written) if finish else None,
        )
        await self.ws.send_bytes(encode(StepFrame(deltas=(delta,))))

    async def write(self, most: int = 1_000_000) -> None:
        """The end of a prompt that was only to be computed: its blocks are in the store."""
        await self.send(finish="length", written=min(most, self.prompt_tokens // BLOCK_TOKENS))

    async def refuse(self, error: CoreError) -> None:
        """End every child with an error."""
        for child in self.open_children:
            await self.send(child=child, finish="error", error=error)

    async def answer(self, words: Sequence[str] = ("one", " two", " three"), cached: int = 0):
        """A whole, clean answer for every child; what of it was delivered before is left out."""
        for child in self.open_children:
            limit = self.request.sampling.max_tokens
            for word in list(words)[self._carried.get(child, 0) : limit]:
                await self.send(word, child=child, cached=cached)
            reason = "stop" if limit > len(words) else "length"
            await self.send(child=child, finish=reason, cached=cached)


Script = Callable[[Call], Awaitable[None]]


async def echo(call: Call) -> None:
    """Answer at once: usually before the router's send has returned."""
    await call.answer()


async def silent(call: Call) -> None:
    """Never answer."""
    await call.aborted.wait()


async def die_in_stream(call: Call) -> None:
    """Two deltas, then the connection breaks; at once where they were delivered before."""
    if not call.continuing:
        await call.send("one")
        await call.send(" two")
    call.replica.break_links()


def stall(release: asyncio.Event) -> Script:
    """Answer once released, or stop when aborted."""

    async def script(call: Call) -> None:
        waits = [asyncio.ensure_future(e.wait()) for e in (release, call.aborted)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if not call.aborted.is_set():
            await call.answer()

    return script


def refuse(error: CoreError) -> Script:
    """Answer every request with this error."""

    async def script(call: Call) -> None:
        await call.refuse(error)

    return script
