"""Which of the answers to a prompt are shown, where more are generated than asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from events.output import TokenLogprob
from router.openai.logprobs import finite


class Ranking:
    """`answers` for each of `prompts` prompts, `shown` of each: those whose tokens have the highest
    mean logprob, before temperature, as OpenAI's `best_of` does. The token that ends an answer
    belongs to no text and doesn't count; an answer without a token is the last choice."""

    def __init__(self, prompts: int, answers: int, shown: int) -> None:
        self._answers = answers
        self._shown = shown
        self._sums = [0.0] * (prompts * answers)
        self._tokens = [0] * (prompts * answers)

    def note(self, index: int, logprobs: Sequence[TokenLogprob]) -> None:
        """More tokens of an answer: answer i of prompt p has the index p * answers + i."""
        self._sums[index] += sum(finite(entry.logprob) for entry in logprobs)
        self._tokens[index] += len(logprobs)

    def shown(self) -> list[int]:
        """Indexes of what is shown, for each prompt the best first; of equals the first one. Where
        all are shown they keep their order."""
        found: list[int] = []
        for start in range(0, len(self._sums), self._answers):
            group = range(start, start + self._answers)
            if self._shown < self._answers:
                found += sorted(group, key=self._mean, reverse=True)[: self._shown]
            else:
                found += group
        return found

    def _mean(self, index: int) -> float:
        tokens = self._tokens[index]
        return self._sums[index] / tokens if tokens else -math.inf
