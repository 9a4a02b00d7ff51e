"""One replica inside this process: the engine's thread, and the front before it on an event loop.

Requests go in as frames of a link and come out as frames, encoded, for no socket: all that a token
costs in a replica is in the figures, but the send.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from configs.model.card import ModelCard
from configs.schema import ReplicaConfig
from events.request import CoreRequest, SamplingParams
from events.session import Ack
from events.wire import encode
from kvstore.identity import Namespace
from replica.engine.loop import EngineThread
from replica.engine.messages import StepOutput
from replica.front.attempts import Attempts
from replica.front.check import Limits
from replica.front.intake import Intake, Served
from replica.front.metrics import Metrics
from replica.front.output import Dispatcher, StepQueue
from replica.front.session import Front, LinkSession
from replica.runner.build import kv_layout
from replica.runner.runner import ModelRunner
from replica.sched.plan import ExecutionPlan, ExecutionResult

PATIENCE_S = 300.0
_KEY = b"k" * 32


class MeteredRunner:
    """A runner that outlives the engines that use it, and knows its own CPU time."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.total_blocks = runner.total_blocks
        self.block_tokens = runner.block_tokens
        self.cpu_s = 0.0

    def execute(self, plan: ExecutionPlan) -> ExecutionResult:
        """See Runner. Of one thread: with more of them the helpers' time is not seen."""
        begun_s = time.thread_time()
        result = self._runner.execute(plan)
        self.cpu_s += time.thread_time() - begun_s
        return result

    def close(self) -> None:
        """Whoever built the runner closes it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of one step on the event loop: when, and the CPU time until then, of the process and
    of the runner alone. `tokens`: how many sequences got one."""

    tokens: int
    now_s: float
    cpu_s: float
    runner_cpu_s: float


class Rig:
    """Made, used and closed on one event loop."""

    def __init__(self, card: ModelCard, config: ReplicaConfig, runner: ModelRunner) -> None:
        self.marks: list[Mark] = []
        self._metered = MeteredRunner(runner)
        queue = StepQueue(asyncio.get_running_loop())
        self.engine = EngineThread(self._metered, queue, config, _KEY)
        counters = Metrics().counters
        attempts = Attempts(self.engine, counters, PATIENCE_S, 1 << 26, time.monotonic)
        self._dispatcher = Dispatcher(self.engine, attempts, counters)
        namespace = Namespace(model="bench", weights="bench", layout=kv_layout(card, config))
        served = Served(
            limits=Limits("bench", card.shape.vocab, config.context_tokens),
            vocabulary=card.tokenizer,
            eos_ids=card.eos_ids,
            cluster_key=_KEY,
            namespace=namespace,
            mailbox_bytes=config.mailbox_bytes,
        )
        intake = Intake(self.engine, attempts, served, counters, time.monotonic)
        self._session = LinkSession("", Front(self.engine, attempts, intake, counters))
        self._ids = itertools.count(1)
        self._sent = 0
        self._stepped = asyncio.Event()
        queue.attach(self._on_step)
        self.engine.start()

    async def close(self) -> None:
        """Ends what still runs."""
        self._session.end()
        await asyncio.to_thread(self.engine.close)

    def submit(self, prompt: Sequence[int], max_tokens: int) -> None:
        """One greedy request."""
        name = str(next(self._ids))
        request = CoreRequest(
            request_id=name,
            attempt=1,
            trace_id="bench",
            tenant="bench",
            model="bench",
            prompt=np.array(prompt, "<u4").tobytes(),
            salt=b"bench",
            sampling=SamplingParams(
                max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True
            ),
            router_boot="bench",
            dispatch_seq=1,
        )
        self._accept(encode(request))

    def full(self, rows: int) -> list[Mark]:
        """The steps in which all of `rows` sequences got a token."""
        return [mark for mark in self.marks if mark.tokens == rows]

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait for a step after which that holds. Raises RuntimeError when none comes."""
        while not reached():
            self._stepped.clear()
            try:
                await asyncio.wait_for(self._stepped.wait(), PATIENCE_S)
            except TimeoutError:
                raise RuntimeError("the engine doesn't get on") from None

    def _accept(self, frame: bytes) -> None:
        if not self._session.accept(frame):
            raise RuntimeError("a frame was not understood")

    def _on_step(self, step: StepOutput, now_s: float) -> None:
        self._dispatcher(step, now_s)
        while self._session.next_frame() is not None:
            self._sent += 1
            self._session.accept(encode(Ack(received=self._sent)))
        tokens = sum(len(child.token_ids) for child in step.children)
        cpu_s = time.process_time()
        self.marks.append(Mark(tokens, time.perf_counter(), cpu_s, self._metered.cpu_s))
        self._stepped.set()
