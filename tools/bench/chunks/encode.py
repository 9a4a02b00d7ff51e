"""The parts that need no socket: decoding a frame, and making events of its deltas."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from events.output import CoreDelta, StepFrame, TokenLogprob, Usage
from events.wire import decode_replica_frame, encode
from router.openai.chat import ChatStream
from router.openai.completions import CompletionStream
from router.openai.logprobs import TokenTexts
from router.openai.schema import ChatRequest, CompletionRequest, Controls
from router.openai.stream import EventStream, new_head

_MESSAGES = [{"role": "user", "content": "x"}]
_DELTAS = 20_000
_FRAME_DELTAS = 100
_ROUNDS = 5


def _deltas(count: int, alternatives: int | None) -> list[CoreDelta]:
    logprobs = ()
    if alternatives is not None:
        top = tuple((50 + i, -1.5 - i) for i in range(alternatives))
        logprobs = (TokenLogprob(40, -0.25, top),)
    return [
        CoreDelta(f"req-{0:024x}-0", 1, 0, " token\n", (40,), logprobs, Usage(100, 64, i + 1))
        for i in range(count)
    ]


def _streams(texts: TokenTexts, alternatives: int | None) -> dict[str, EventStream]:
    controls = Controls(logprobs=alternatives)
    head = new_head("bench", "smollm2-135m-instruct", "fp_0123456789")
    return {
        "chat": ChatStream(head, ChatRequest("m", _MESSAGES, controls), texts),
        "completion": CompletionStream(head, CompletionRequest("m", ("x",), controls), texts),
    }


def _best_us(work: Callable[[], int]) -> float:
    """CPU time per delta, best of the rounds; `work` says how many deltas it took."""
    costs = []
    for _ in range(_ROUNDS):
        started_s = time.process_time()
        deltas = work()
        costs.append((time.process_time() - started_s) / deltas * 1e6)
    return min(costs)


def _feed(stream: EventStream, deltas: Sequence[CoreDelta]) -> int:
    for delta in deltas:
        stream.feed(delta)
    return len(deltas)


def _decode(frame: bytes) -> int:
    for _ in range(_DELTAS // _FRAME_DELTAS):
        decode_replica_frame(frame)
    return _DELTAS


def _name(route: str, alternatives: int | None) -> str:
    return route if alternatives is None else f"{route}_top_{alternatives}"


def costs_us(texts: TokenTexts) -> dict[str, float]:
    """CPU time per delta of each part."""
    costs = {}
    frame = encode(StepFrame(deltas=tuple(_deltas(_FRAME_DELTAS, None))))
    costs["decode"] = _best_us(lambda: _decode(frame))
    for alternatives in (None, 0, 5):
        deltas = _deltas(_DELTAS, alternatives)
        for name in ("chat", "completion"):
            costs[_name(name, alternatives)] = _best_us(
                lambda name=name, alternatives=alternatives, deltas=deltas: _feed(
                    _streams(texts, alternatives)[name], deltas
                )
            )
    return costs
