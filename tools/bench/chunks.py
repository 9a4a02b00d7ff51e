"""What one delta costs on its way to the socket: `python -m tools.bench.chunks`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from configs.model.card import load_card
from events.output import CoreDelta, TokenLogprob, Usage
from router.openai.chat import ChatStream
from router.openai.completions import CompletionStream
from router.openai.logprobs import TokenTexts
from router.openai.schema import ChatRequest, CompletionRequest, Controls
from router.openai.stream import EventStream, new_head

_MESSAGES = [{"role": "user", "content": "x"}]


def _deltas(count: int, alternatives: int | None) -> list[CoreDelta]:
    logprobs = ()
    if alternatives is not None:
        top = tuple((50 + i, -1.5 - i) for i in range(alternatives))
        logprobs = (TokenLogprob(40, -0.25, top),)
    return [
        CoreDelta("r", 0, 0, " token\n", (40,), logprobs, Usage(100, 64, i + 1))
        for i in range(count)
    ]


def _streams(texts: TokenTexts, alternatives: int | None) -> dict[str, EventStream]:
    controls = Controls(logprobs=alternatives)
    head = new_head("bench", "smollm2-135m-instruct", "fp_0123456789")
    return {
        "chat": ChatStream(head, ChatRequest("m", _MESSAGES, controls), texts),
        "completion": CompletionStream(head, CompletionRequest("m", ("x",), controls), texts),
    }


def _measure_us(stream: EventStream, deltas: list[CoreDelta]) -> float:
    started = time.perf_counter()
    for delta in deltas:
        stream.feed(delta)
    return (time.perf_counter() - started) / len(deltas) * 1e6


def main() -> None:
    """Print microseconds per delta, best of five, for both routes with and without logprobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a GGUF file or a safetensors folder")
    parser.add_argument("--deltas", type=int, default=20_000)
    options = parser.parse_args()
    texts = TokenTexts(load_card(options.model).tokenizer)
    for alternatives in (None, 0, 5):
        deltas = _deltas(options.deltas, alternatives)
        for name in ("chat", "completion"):
            best = min(_measure_us(_streams(texts, alternatives)[name], deltas) for _ in range(5))
            print(f"{name:10} logprobs={alternatives!s:4} {best:6.2f} us per delta")


if __name__ == "__main__":
    main()
