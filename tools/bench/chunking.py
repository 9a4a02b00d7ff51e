"""What a long prompt costs those who decode, and what sparing them costs the prompt: the real
scheduler and the real model, with the prompt in one piece, in fixed chunks, and in chunks that
follow a target for the gap between two tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import numpy as np

from events.request import SamplingParams
from kvstore.identity import KeyChain, block_key
from replica.engine.messages import EngineRequest
from replica.sched.ledger import Limits
from replica.sched.plan import ChildId, Runner
from replica.sched.scheduler import Scheduler

DECODES = 16
DECODE_PROMPT_TOKENS = 64
LONG_TOKENS = 2_048
FIXED_TOKENS = 512
WARM_STEPS = 24
ROUNDS = 3
MODES = {"off": (LONG_TOKENS + DECODES, 0.0), "fixed": (FIXED_TOKENS, 0.0)}
"""Tokens of a step at most, and the target in ms."""

_KEY = b"bench" * 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """Medians over the rounds; the gaps are those of the decodes until the prompt's first token."""

    itl_p99_ms: float
    long_ttft_ms: float


class ChunkingBench:
    """One runner; a scheduler for each mode, so that each learns its own step times."""

    def __init__(self, runner: Runner, vocab: int) -> None:
        self._runner = runner
        self._vocab = vocab
        self._random = np.random.default_rng(0)
        self._children = 0

    def measure(self, itl_target_ms: float) -> dict[str, Outcome]:
        """Every mode; `target` aims at `itl_target_ms`."""
        modes = MODES | {"target": (LONG_TOKENS + DECODES, itl_target_ms)}
        return {name: self._mode(*mode) for name, mode in modes.items()}

    def _mode(self, step_tokens: int, itl_target_ms: float) -> Outcome:
        runner = self._runner
        scheduler = Scheduler(
            Limits(
                total_blocks=runner.total_blocks,
                block_tokens=runner.block_tokens,
                context_tokens=1 << 20,
                max_running=DECODES + 1,
                max_step_tokens=step_tokens,
                max_waiting_tokens=1 << 30,
                itl_target_ms=itl_target_ms,
            ),
            next_key=partial(block_key, _KEY),
        )
        for _ in range(DECODES):
            self._add(scheduler, DECODE_PROMPT_TOKENS, 100_000)
        for _ in range(WARM_STEPS):
            self._step(scheduler)
        rounds = [self._round(scheduler) for _ in range(ROUNDS + 1)][1:]
        for request in list(scheduler.table):
            scheduler.lifecycle.abort(request.child)
        gaps, ttfts = zip(*rounds, strict=True)
        return Outcome(float(np.median(gaps)), float(np.median(ttfts)))

    def _round(self, scheduler: Scheduler) -> tuple[float, float]:
        """One long prompt: the p99 gap of the decodes in ms, and its time to first token in ms."""
        long = self._add(scheduler, LONG_TOKENS, 1)
        begin = last = time.perf_counter()
        gaps: list[float] = []
        while True:
            heard = self._step(scheduler)
            now = time.perf_counter()
            gaps += [now - last] * (len(heard) - (long in heard))
            last = now
            if long in heard:
                return 1e3 * float(np.quantile(gaps, 0.99)), 1e3 * (now - begin)

    def _step(self, scheduler: Scheduler) -> set[ChildId]:
        """One step; who got a token."""
        plan = scheduler.plan(time.monotonic())
        if plan is None:
            raise RuntimeError("nothing to plan")
        scheduler.commit(self._runner.execute(plan))
        return {output.child for output in scheduler.take_outputs() if output.token_ids}

    def _add(self, scheduler: Scheduler, prompt_tokens: int, max_tokens: int) -> ChildId:
        self._children += 1
        child = ChildId(self._children)
        prompt = self._random.integers(0, self._vocab, prompt_tokens).tolist()
        scheduler.add(
            EngineRequest(
                child=child,
                prompt=tuple(prompt),
                chain=KeyChain(b"", child.to_bytes(16, "little")),
                params=SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0),
                seed=0,
                eos_ids=frozenset(),
                tenant="bench",
                arrival_s=time.monotonic(),
            )
        )
        return child
