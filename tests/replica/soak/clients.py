"""Routers that ask at random, read slowly, pause, change their minds, and go away."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp

from events.errors import CoreError
from events.output import CoreDelta, StepFrame
from events.request import LINK_VERSION, Abort, Hold, LinkHello, Resume
from events.session import ACK_FRAMES, Ack
from events.wire import decode_replica_frame, encode
from tests.replica.front.rig import SECRET, Answer
from tests.replica.soak.scripts import Script
from tests.replica.soak.world import World

MAX_OPEN = 10
ALLOWED = ("deadline", "deadline_exceeded", "slow_reader", "queue_full", "grammar_timeout")
DAWDLES_S = 1.0
"""For how long a dawdler holds a request."""

LEFT_S = 180.0
"""How long what is still open at the end may take."""


@dataclass
class Asked:
    """A request whose answer is not complete. `held_s`: since when it is held by a dawdler, who had
    seen `seen` tokens of it by then."""

    script: Script
    attempt: int
    answers: list[Answer] = field(default_factory=list)
    held_s: float | None = None
    seen: int = 0

    @property
    def over(self) -> bool:
        return all(answer.finish is not None for answer in self.answers)

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)


class Router:
    """One link after the other. `tally` counts what happened to whole requests and to children."""

    def __init__(
        self,
        name: str,
        world: World,
        scripts: list[Script],
        tally: Counter[str],
        seed: int,
        slow: bool = False,
        dawdles: bool = False,
    ) -> None:
        """`slow`: it only asks, and looks away often, for longer than the replica has patience.
        `dawdles`: it holds each of its requests again as soon as that has gone on a little."""
        self._slow = slow
        self._dawdles = dawdles
        self._looks_away, self._away_s = (0.3, (1.6, 2.5)) if slow else (0.01, (0.05, 0.2, 0.5))
        self._name = name
        self._world = world
        self._scripts = scripts
        self._tally = tally
        self._rng = random.Random(seed)
        self._open: dict[str, Asked] = {}
        self._numbers = 0
        self._lives = 0
        self._later: set[asyncio.Task[None]] = set()

    async def run(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            self._lives += 1
            front = self._world.front
            async with front.session.ws_connect(front.url + "/link", max_msg_size=0) as socket:
                await self._live(socket, until_s)

    async def _live(self, socket: aiohttp.ClientWebSocketResponse, until_s: float) -> None:
        boot = f"{self._name}-{self._lives}"
        hello = LinkHello(version=LINK_VERSION, router_id="r", router_boot=boot, secret=SECRET)
        await socket.send_bytes(encode(hello))
        reading = asyncio.create_task(self._read(socket))
        end_s = time.monotonic() + self._rng.expovariate(1 / 15)
        while time.monotonic() < min(until_s, end_s) and not reading.done():
            if len(self._open) < MAX_OPEN:
                await self._ask(socket, boot)
            await asyncio.sleep(self._rng.expovariate(1 / 0.03))
            await self._meddle(socket)
        if end_s < until_s and not reading.done():
            self._go_away(socket)
        else:
            await self._let_go(socket)
            await self._wait_for_all(reading)
            self._lose_all()  # unless the replica had enough of a router that doesn't read
        for task in (reading, *self._later):
            task.cancel()
        results = await asyncio.gather(reading, *self._later, return_exceptions=True)
        self._later.clear()
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, ConnectionError):
                raise result

    def _go_away(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Without a word."""
        self._lose_all()
        socket._response.connection.transport.abort()

    def _lose_all(self) -> None:
        """Nothing more comes of what is open."""
        self._tally["lost"] += len(self._open)
        self._open.clear()

    async def _wait_for_all(self, reading: asyncio.Task[None]) -> None:
        deadline_s = time.monotonic() + LEFT_S
        while self._open and not reading.done():
            assert time.monotonic() < deadline_s, f"{len(self._open)} requests never ended"
            await asyncio.sleep(0.02)

    async def _ask(self, socket: aiohttp.ClientWebSocketResponse, boot: str) -> None:
        rng, script = self._rng, self._rng.choice(self._scripts)
        self._numbers += 1
        name = f"{boot}-{self._numbers}"
        self._open[name] = Asked(script, 1, [Answer() for _ in range(script.request.sampling.n)])
        self._tally["asked"] += 1
        wishes: dict[str, float | None] = {"priority": 1}
        if not (self._slow or self._dawdles):
            wishes = {
                "priority": rng.choice((0, 0, 0, 1, -1)),
                "weight": rng.choice((0.5, 1.0, 4.0)),
                "ttft_deadline_ms": rng.choice((None, None, None, 5_000.0, 200.0)),
                "itl_deadline_ms": rng.choice((None, 250.0)),
                "e2e_deadline_ms": rng.choice((None, None, None, None, 60_000.0, 300.0)),
            }
        asked = script.asked(name, router_boot=boot, dispatch_seq=self._numbers, **wishes)
        await socket.send_bytes(encode(asked))

    async def _meddle(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        if self._dawdles:
            await self._dawdle(socket)
        if not self._open or self._slow or self._dawdles:
            return
        name = self._rng.choice(list(self._open))
        word = self._rng.random()
        if word < 0.1:
            await socket.send_bytes(encode(Abort(request_id=name, attempt=1)))
        elif word < 0.2:
            await socket.send_bytes(encode(Hold(request_id=name, attempt=1)))
            resuming = asyncio.create_task(self._resume(socket, name))
            self._later.add(resuming)
            resuming.add_done_callback(self._later.discard)

    async def _dawdle(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        now_s = time.monotonic()
        for name, asked in list(self._open.items()):
            if asked.held_s is None and asked.tokens > asked.seen:
                asked.held_s, asked.seen = now_s, asked.tokens
                await socket.send_bytes(encode(Hold(request_id=name, attempt=1)))
            elif asked.held_s is not None and now_s - asked.held_s > DAWDLES_S:
                asked.held_s = None
                await socket.send_bytes(encode(Resume(request_id=name, attempt=1)))

    async def _let_go(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Of what a dawdler holds."""
        for name, asked in self._open.items():
            if asked.held_s is not None:
                await socket.send_bytes(encode(Resume(request_id=name, attempt=1)))

    async def _resume(self, socket: aiohttp.ClientWebSocketResponse, name: str) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, 0.5))
        await socket.send_bytes(encode(Resume(request_id=name, attempt=1)))

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        received = 0
        async for message in socket:
            frame = decode_replica_frame(message.data)
            if isinstance(frame, StepFrame):
                received += 1
                for delta in frame.deltas:
                    self._take(delta)
                if received % ACK_FRAMES == 0:
                    await socket.send_bytes(encode(Ack(received=received)))
                if self._rng.random() < self._looks_away:
                    self._tally["slow reads"] += 1
                    await _look_away(socket, self._rng.choice(self._away_s))

    def _take(self, delta: CoreDelta) -> None:
        asked = self._open.get(delta.request_id)
        assert asked is not None, "an answer to nothing, or behind its end"
        answer = asked.answers[delta.child]
        answer.add(delta)
        answer.deltas.clear()
        if answer.finish is not None:
            self._check(asked.script, delta.child, answer)
        if asked.over:
            del self._open[delta.request_id]
            self._tally["answered"] += 1

    def _check(self, script: Script, child: int, answer: Answer) -> None:
        """Nothing lost, nothing twice: the answer that it gives alone, or the beginning of it."""
        right, finish = script.answers[child], answer.finish
        assert finish is not None
        self._tally[f"ended: {finish.reason}"] += 1
        self._tally["tokens"] += len(answer.token_ids)
        self._tally["recomputed tokens"] += finish.recomputed_tokens
        if finish.reason in ("stop", "length"):
            said = (answer.text, answer.token_ids, finish.reason)
            assert said == (right.text, right.token_ids, right.finish.reason), script.request
            return
        # What was held back for a stop string is shown at the end, and may go beyond the answer.
        both = min(len(answer.token_ids), len(right.token_ids))
        assert answer.token_ids[:both] == right.token_ids[:both], script.request
        if finish.reason == "error":
            error: CoreError | None = finish.error
            assert error is not None
            assert error.code in ALLOWED, error
            self._tally[f"error: {error.code}"] += 1


async def _look_away(socket: aiohttp.ClientWebSocketResponse, seconds: float) -> None:
    """Take nothing out of the kernel meanwhile: else the client goes on reading for us, up to so
    much that no answer of these tests is ever too long for it."""
    response = socket._response
    if response.connection is None or response.connection.transport is None:
        return
    transport = response.connection.transport
    transport.pause_reading()
    try:
        await asyncio.sleep(seconds)
    finally:
        if not transport.is_closing():
            transport.resume_reading()
