"""Engines beside one another: each a process, asked in turn, round by round.

So other work on the machine meets them all, and what is told of two of them is the median of their
ratios within a round.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tools.bench.child import Child
from tools.errors import CommandError

PREFILL_TOKENS = (512, 2048)
DECODE_ROWS = (1, 4, 16, 64)
LOAD_S = 600.0
ANSWER_S = 600.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Course:
    """What everybody runs: prefill of so many tokens, decode of so many sequences, `steps` steps
    behind `context` tokens each."""

    prefill_tokens: tuple[int, ...] = PREFILL_TOKENS
    decode_rows: tuple[int, ...] = DECODE_ROWS
    context: int = 128
    steps: int = 16
    rounds: int = 3

    @property
    def rows(self) -> int:
        """The most sequences at once."""
        return max(self.decode_rows)

    @property
    def most_tokens(self) -> int:
        """The longest sequence, with room for what early ones write while others are prefilled."""
        return max(max(self.prefill_tokens) + 64, 4 * (self.context + self.steps) + 4 * self.rows)

    @property
    def kv_tokens(self) -> int:
        """What a pool has to hold."""
        return max(self.most_tokens, self.rows * (2 * self.context + self.steps + 64))


class EngineError(RuntimeError):
    """An engine said that it can't, or said nothing."""


class Contender:
    """One engine's process. Use as a context manager; raises EngineError."""

    def __init__(
        self,
        name: str,
        command: list[str],
        log: Path,
        cpu: int | None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._child = Child(command, cpu, log, environ, talks=True)

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.__exit__()

    def load(self, words: Mapping[str, Any]) -> dict[str, Any]:
        """What it is."""
        return self._ask({"do": "load", **words}, LOAD_S)

    def prefill(self, tokens: int) -> float:
        """Tokens a second."""
        return tokens / float(self._ask({"do": "prefill", "tokens": tokens})["seconds"])

    def decode(self, rows: int, course: Course) -> tuple[float, float | None]:
        """Tokens a second, and the share of overhead where it tells."""
        words = {"do": "decode", "rows": rows, "context": course.context, "steps": course.steps}
        answer = self._ask(words)
        return rows * course.steps / float(answer["seconds"]), answer.get("overhead")

    def forward(self, rounds: int) -> dict[str, Any]:
        """Ours alone: see tools.bench.engine.forward."""
        return self._ask({"do": "forward", "rounds": rounds})

    def _ask(self, words: Mapping[str, Any], patience_s: float = ANSWER_S) -> dict[str, Any]:
        try:
            self._child.tell(json.dumps(words).encode())
            answer = json.loads(self._child.answer(patience_s))
        except (CommandError, ValueError) as error:
            raise EngineError(f"{self.name}: {error}") from error
        if "error" in answer:
            raise EngineError(f"{self.name}: {answer['error']}")
        return dict(answer)


@dataclass(slots=True)
class Scores:
    """One contender's tokens a second: for each task those of every round."""

    prefill: dict[int, list[float]] = field(default_factory=dict)
    decode: dict[int, list[float]] = field(default_factory=dict)
    overhead: dict[int, list[float]] = field(default_factory=dict)

    def figures(self) -> dict[str, dict[str, float]]:
        """Medians, by task."""
        return {"prefill": _medians(self.prefill), "decode": _medians(self.decode)}

    def ratios(self, other: Scores) -> dict[str, dict[str, float]]:
        """How many times as fast as `other`: medians of the rounds' ratios."""
        return {
            "prefill": _medians(_over(self.prefill, other.prefill)),
            "decode": _medians(_over(self.decode, other.decode)),
        }


def run(contenders: Sequence[Contender], course: Course, say: Say) -> dict[str, Scores]:
    """All rounds, behind a lap that warms up and doesn't count. Raises EngineError."""
    scores = {contender.name: Scores() for contender in contenders}
    for contender in contenders:
        contender.prefill(min(course.prefill_tokens))
        contender.decode(1, course)
    for number in range(course.rounds):
        say(f"round {number + 1} of {course.rounds}")
        for tokens in course.prefill_tokens:
            for contender in contenders:
                found = contender.prefill(tokens)
                scores[contender.name].prefill.setdefault(tokens, []).append(found)
        for rows in course.decode_rows:
            for contender in contenders:
                found, overhead = contender.decode(rows, course)
                score = scores[contender.name]
                score.decode.setdefault(rows, []).append(found)
                if overhead is not None:
                    score.overhead.setdefault(rows, []).append(overhead)
    return scores


def _medians(rounds: Mapping[int, Sequence[float]]) -> dict[str, float]:
    return {str(task): median(values) for task, values in rounds.items()}


def _over(
    ours: Mapping[int, Sequence[float]], theirs: Mapping[int, Sequence[float]]
) -> dict[int, list[float]]:
    return {
        task: [one / other for one, other in zip(values, theirs[task], strict=True)]
        for task, values in ours.items()
        if task in theirs
    }
