"""The client, in a process of its own: `python -m tools.bench.live.client`, a plan on stdin.

Open loop: every request starts at its time, whatever became of the others. One line of JSON for
each answer, a last one for the whole.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace

import aiohttp
import msgspec
import uvloop

from tools.bench.client import ChatClient, Sample
from tools.bench.live.plan import Ask, Plan
from tools.bench.live.texts import Texts

LEAD_S = 0.2
"""Between getting ready and the first request."""


class Answered(msgspec.Struct, frozen=True):
    """The answer to the plan's request `place`, sent `late_ms` after its time."""

    place: int
    late_ms: float
    sample: Sample


class Whole(msgspec.Struct, frozen=True):
    """From the first request's time to the last answer, and the CPU that the client took."""

    wall_s: float
    cpu_s: float


class Player:
    """Plays one plan."""

    def __init__(self, plan: Plan, client: ChatClient) -> None:
        self._plan = plan
        self._client = client
        texts = Texts(plan.words, plan.block_tokens, plan.seed)
        self._prompts = [texts.prompt(ask.blocks, ask.text_tokens) for ask in plan.asks]
        self._start_s = 0.0

    async def play(self) -> Whole:
        """All of it; says each answer as it comes."""
        self._start_s = time.perf_counter() + LEAD_S
        cpu_s = time.process_time()
        if self._plan.in_turn:
            for place, ask in enumerate(self._plan.asks):
                self._start_s = time.perf_counter() - ask.at_s
                await self._ask(place, ask)
        else:
            await self._open_loop()
        return Whole(time.perf_counter() - self._start_s, time.process_time() - cpu_s)

    async def _open_loop(self) -> None:
        async with asyncio.TaskGroup() as group:
            for place, ask in enumerate(self._plan.asks):
                await asyncio.sleep(max(0.0, self._start_s + ask.at_s - time.perf_counter()))
                group.create_task(self._ask(place, ask))

    async def _ask(self, place: int, ask: Ask) -> None:
        late_ms = 1e3 * (time.perf_counter() - self._start_s - ask.at_s)
        message = {"role": "user", "content": self._prompts[place]}
        sample = await self._client.chat(ask.tenant, self._plan.key, 0, [message], ask.max_tokens)
        _say(Answered(place, late_ms, replace(sample, text="")))


def _say(line: Answered | Whole) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


async def run(plan: Plan) -> None:
    """With as many connections as it takes."""
    unbounded = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=unbounded, timeout=timeout) as session:
        player = Player(plan, ChatClient(session, plan.url, plan.model, plan.extra))
        _say(await player.play())


def main() -> int:
    """The plan comes on stdin, so that its key is in nobody's list of processes."""
    uvloop.run(run(msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
