"""One workload for every configuration of the engine: shared prefixes, mixed lengths, in a closed
loop, and what came of it.
"""

from __future__ import annotations

import itertools
import random
import time
from array import array
from collections import deque
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np

from configs.model.card import ModelCard
from configs.schema import ReplicaConfig
from events.request import SamplingParams
from kvstore.identity import Namespace, chain
from replica.engine.loop import EngineThread
from replica.engine.messages import EngineRequest, StepOutput
from replica.runner.build import build_runner, kv_layout
from replica.sched.plan import ChildId

PATIENCE_S = 300.0
_KEY = b"k" * 32


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests of `groups` groups, early ones more often; each has its group's prefix and some
    tokens of its own. One in `long_one_in` has a long prompt that nobody shares; 0: none. `users`
    wait for their answer before they send again. Lengths in tokens, from the first to the
    second."""

    requests: int = 48
    users: int = 12
    groups: int = 6
    prefix: int = 384
    own: tuple[int, int] = (16, 96)
    answer: tuple[int, int] = (16, 64)
    long_one_in: int = 8
    long: tuple[int, int] = (500, 900)
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Call:
    """One request of the workload."""

    prompt: tuple[int, ...]
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run. `cached_ratio`: prompt tokens that were not computed."""

    output_tokens_per_s: float
    output_tokens_per_cpu_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    cached_ratio: float
    preemptions: int


def calls(mix: Mix, vocab: int) -> list[Call]:
    """The same for the same mix."""
    rng = random.Random(mix.seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(count))

    prefixes = [tokens(mix.prefix) for _ in range(mix.groups)]
    weights = [1 / (place + 1) for place in range(mix.groups)]
    found = []
    for number in range(mix.requests):
        if mix.long_one_in and number % mix.long_one_in == mix.long_one_in - 1:
            prompt = tokens(rng.randint(*mix.long))
        else:
            (prefix,) = rng.choices(prefixes, weights)
            prompt = prefix + tokens(rng.randint(*mix.own))
        found.append(Call(prompt, rng.randint(*mix.answer)))
    return found


@dataclass(slots=True)
class _Story:
    """What happened to one request; times in s."""

    sent_s: float
    times: list[float]
    prompt_tokens: int
    cached_tokens: int = 0


class Replay:
    """One configuration, loaded anew: its runner, and an engine for each run."""

    def __init__(self, card: ModelCard, config: ReplicaConfig) -> None:
        self._config = config
        self._namespace = Namespace(model="bench", weights="bench", layout=kv_layout(card, config))
        self._ids = itertools.count(1)
        self._steps: SimpleQueue[tuple[float, StepOutput]] = SimpleQueue()
        runner = build_runner(card, config)
        self._engine = EngineThread(runner, self._hear, config, _KEY)
        self._engine.start()

    def close(self) -> None:
        """The runner goes with the engine."""
        self._engine.close()

    def run(self, todo: list[Call], users: int) -> Outcome:
        """All calls. Raises RuntimeError when the engine stands still or refuses one."""
        stories: dict[int, _Story] = {}
        waiting = deque(todo)
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(min(users, len(todo))):
            self._send(waiting.popleft(), stories)
        unfinished = len(todo)
        while unfinished:
            try:
                now_s, step = self._steps.get(timeout=PATIENCE_S)
            except Empty:
                raise RuntimeError("the engine doesn't get on") from None
            for output in step.children:
                if output.error is not None:
                    raise RuntimeError(output.error.message)
                story = stories[output.child]
                story.times += [now_s] * len(output.token_ids)
                if output.finish is None:
                    continue
                story.cached_tokens = output.cached_tokens
                unfinished -= 1
                if waiting:
                    self._send(waiting.popleft(), stories)
        wall_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
        return _outcome(
            list(stories.values()), wall_s, cpu_s, self._engine.load().preemptions_total
        )

    def _send(self, call: Call, stories: dict[int, _Story]) -> None:
        child = ChildId(next(self._ids))
        prompt = array("I", call.prompt).tobytes()
        stories[child] = _Story(time.perf_counter(), [], len(call.prompt))
        self._engine.submit(
            EngineRequest(
                child=child,
                prompt=call.prompt,
                chain=chain(_KEY, self._namespace, b"bench", prompt),
                params=SamplingParams(
                    max_tokens=call.answer_tokens, seed=0, temperature=0.0, ignore_eos=True
                ),
                seed=0,
                eos_ids=frozenset(),
                tenant="bench",
                arrival_s=time.monotonic(),
                salt=b"bench",
            )
        )

    def _hear(self, step: StepOutput) -> None:
        self._steps.put((time.perf_counter(), step))


def _outcome(stories: list[_Story], wall_s: float, cpu_s: float, preemptions: int) -> Outcome:
    tokens = sum(len(story.times) for story in stories)
    ttfts = [1e3 * (story.times[0] - story.sent_s) for story in stories]
    gaps = [1e3 * gap for story in stories for gap in np.diff(story.times)]
    prompts = sum(story.prompt_tokens for story in stories)
    return Outcome(
        output_tokens_per_s=tokens / wall_s,
        output_tokens_per_cpu_s=tokens / cpu_s,
        ttft_p50_ms=float(np.quantile(ttfts, 0.5)),
        ttft_p99_ms=float(np.quantile(ttfts, 0.99)),
        itl_p50_ms=float(np.quantile(gaps, 0.5)),
        itl_p99_ms=float(np.quantile(gaps, 0.99)),
        cached_ratio=sum(story.cached_tokens for story in stories) / prompts,
        preemptions=preemptions,
    )
