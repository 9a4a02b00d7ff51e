"""One stream between a scripted replica and a scripted socket, with all that is real between."""

from __future__ import annotations

import asyncio
import ctypes
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from events.output import CoreDelta, CoreFinish, StepFrame, TokenLogprob, Usage
from events.request import SamplingParams
from events.wire import encode
from router.dispatch.chutes import Chutes
from router.dispatch.dispatch import Dispatcher
from router.dispatch.failover import RetryBudget, Run
from router.dispatch.sink import AttemptSink, SinkLimits
from router.dispatch.table import AttemptTable
from router.openai.chat import ChatStream
from router.openai.logprobs import TokenTexts
from router.openai.schema import ChatRequest, Controls
from router.openai.stream import ReplyHead
from router.serving.answers import Answers
from router.serving.pump import Pump
from router.telemetry.metrics import Metrics
from tests.router.gateway.house import events
from tests.router.gateway.kit import Deaf, PlainChooser, job
from tests.waiting import PATIENCE_S

HEAD = ReplyHead("chatcmpl-1", 1, "tiny", "fp")
MESSAGES = [{"role": "user", "content": "hi"}]
CHUNK = re.compile(rb"([0-9a-f]+)\r\n(.*?\n\n)\r\n", re.DOTALL)
LIMITS = SinkLimits(buffer_bytes=1 << 20, slow_reader_s=1_000.0)


class Link:
    """The replica's side: whatever the test puts into `sink`. Also the Links of one."""

    continues = False

    def __init__(self, chutes: Chutes | None = None) -> None:
        self.attempts = AttemptTable(chutes)
        self.frames: list[object] = []
        self.sink: AttemptSink

    def get(self, replica: str) -> Link:
        return self

    def unable_to_continue(self) -> frozenset[str]:
        return frozenset()

    def submit(self, request: object, sink: AttemptSink) -> None:
        self.sink = sink
        self.attempts.add(sink)

    def control(self, frame: object) -> None:
        self.frames.append(frame)

    def forget(self, sink: AttemptSink) -> None:
        pass


class Writer:
    """A client's socket, full unless `takes`; counts what was written which way."""

    def __init__(self, takes: bool) -> None:
        self.takes = takes
        self.got = b""
        self.pushed = self.pulled = self.passed = 0
        self.clean = False
        self.response = web.StreamResponse()

    def free(self) -> bool:
        return self.takes

    def put(self, data: bytes) -> None:
        assert self.takes
        self.pushed += 1
        self.got += data

    def flush(self) -> None:
        pass

    socket = -1

    def idle(self) -> bool:
        return True

    def send(self, data: bytes) -> bool:
        self.passed += 1
        for size, chunk in CHUNK.findall(data):
            assert len(chunk) == int(size, 16)
            self.got += chunk
        return self.takes

    async def write(self, data: bytes) -> None:
        self.pulled += 1
        self.got += data

    async def open(self, headers: object) -> None:
        pass

    async def close(self) -> None:
        self.clean = True

    async def fail(self, last: Sequence[bytes]) -> None:
        self.got += b"".join(last)


class Rig:
    """One stream: real sink, attempt, run and pump between a scripted replica and writer."""

    def __init__(
        self,
        n: int,
        logprobs: int | None,
        texts: TokenTexts,
        takes: bool,
        kernels: ctypes.CDLL | None = None,
    ) -> None:
        """With `kernels` there are chutes."""
        self.metrics = Metrics()
        chutes = None if kernels is None else Chutes(kernels, self.metrics.gaps)
        self.link, self.writer, self.tokens = Link(chutes), Writer(takes), 0
        chooser = PlainChooser()
        chooser.linked.add("r0")
        dispatcher = Dispatcher(chooser, self.link, "boot", LIMITS, Deaf())
        asked = job(request_id="r", sampling=SamplingParams(max_tokens=99, seed=1, n=n))
        self.run = Run(asked, dispatcher, RetryBudget(), 0, grow=self._grow)
        request = ChatRequest(
            "tiny", MESSAGES, Controls(n=n, logprobs=logprobs), include_usage=True
        )
        self.reply = ChatStream(HEAD, request, texts)
        self.chooser = chooser

    def _grow(self, tokens: int) -> None:
        self.tokens += tokens

    async def respond(self) -> None:
        with Answers([self.run], "v1") as answers:
            await Pump(self.writer, answers, self.reply, self.metrics, 1_000.0).respond()

    async def play(self, script: Sequence[tuple[bool, bool, CoreDelta]]) -> None:
        """Each step: whether the socket takes more, whether tasks get a turn, and a delta."""
        task = asyncio.create_task(self.respond())
        await turn()
        for takes, rests, delta in script:
            self.writer.takes = takes
            await self.arrive(delta)
            if rests:
                await turn()
        await asyncio.wait_for(task, PATIENCE_S)

    async def arrive(self, *deltas: CoreDelta) -> None:
        """In one frame, as the link takes it."""
        table = self.link.attempts
        assert await table.take(encode(StepFrame(deltas=deltas))) is None
        assert table.late_deltas == 0


async def turn() -> None:
    """Long enough for whatever a delta wakes up."""
    for _ in range(8):
        await asyncio.sleep(0)


def deltas_of(n: int, parts: Sequence[tuple[int, str]], logprobs: bool) -> list[CoreDelta]:
    """The parts as deltas, then an end for each child; one id per part."""
    sent = [0] * n
    deltas = []
    for child, text in parts:
        child %= n
        sent[child] += 1
        entries = (TokenLogprob(65 + child, -0.5),) if logprobs else ()
        usage = Usage(7, 3, sent[child])
        deltas.append(CoreDelta("r", 1, child, text, (65 + child,), entries, usage))
    for child in range(n):
        end = CoreFinish(reason="stop" if child else "length")
        deltas.append(CoreDelta("r", 1, child, "", (), (), Usage(7, 3, sent[child]), end))
    return deltas


def content(stream: bytes) -> dict[int, dict[str, Any]]:
    """What each choice of a stream said, all of it."""
    *chunks, last = events(stream)
    assert last == b"[DONE]"
    said: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "logprobs": [], "end": None})
    for chunk in map(json.loads, chunks):
        for choice in chunk["choices"]:
            mine = said[choice["index"]]
            assert mine["end"] is None
            mine["text"] += choice["delta"].get("content") or ""
            mine["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
            mine["end"] = choice["finish_reason"]
    return dict(said)
