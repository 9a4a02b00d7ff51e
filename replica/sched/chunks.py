"""Chunked prefill: which prompts a step goes on with, and how many tokens of each.

Shortest remaining prefill first, so that one long prompt keeps no short one waiting; with ageing,
so that no stream of short ones keeps a long one waiting. While others decode, the chunks together
take no more time than the target for the gap between two tokens leaves, by the step times learnt
here (Sarathi-Serve, OSDI'24, with the size in ms instead of tokens).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from events.load import DecodeFit, PrefillFit
from replica.sched.request import Request

AGEING = 0.5
"""A prompt that has waited 1 s longer may take this much longer (in s) and still goes first."""

MIN_PREFILL = 1.0
"""Of what a step takes without it: what prefill gets even where that is all that the target has.
Less would keep prompts waiting on a slow machine for gaps that are long anyway."""

SURE_CONFIDENCE = 0.5
"""Below it a model of step times is a guess."""

MIN_CHUNK_TOKENS = 16
"""Smaller pieces cost a row, and bring nobody further. The end of a prompt may be smaller."""


@dataclass(frozen=True, slots=True)
class StepModel:
    """The step times of this replica as learnt so far. `error`: mean relative error, 0 to 1."""

    prefill: PrefillFit
    decode: DecodeFit
    error: float

    def rest_ms(self, request: Request) -> float:
        """How long the rest of a request's prefill takes."""
        return self.prefill.predict_ms(request.computed, request.debt)

    def spent_ms(self, request: Request) -> float:
        """How long what it did not find in the cache has taken so far."""
        return self.prefill.predict_ms(
            request.cached_tokens, max(0, request.computed - request.cached_tokens)
        )

    def decodes_ms(self, decodes: Sequence[Request]) -> float:
        """What a step with a chunk in it takes beside the chunk."""
        context = sum(request.computed for request in decodes)
        fit = self.decode
        return self.prefill.a + fit.per_row * len(decodes) + fit.per_context * context


def shortest_first(prefills: Sequence[Request], model: StepModel) -> list[Request]:
    """In the order in which they get tokens: priority, then remaining time with ageing. The time
    in which it was computed itself makes no prompt older."""

    def key(request: Request) -> tuple[float, ...]:
        since_ms = 1e3 * request.spec.arrival_s + model.spent_ms(request)
        aged_ms = model.rest_ms(request) + AGEING * since_ms
        return (-request.spec.priority, aged_ms, *request.rank)

    return sorted(prefills, key=key)


class ChunkBudget:
    """What prefill may take of one step: tokens, and milliseconds where `itl_target_ms` says so."""

    def __init__(
        self, tokens: int, itl_target_ms: float, decodes: Sequence[Request], model: StepModel
    ) -> None:
        self._tokens = tokens
        self._fit = model.prefill
        self._ms = math.inf
        self._untouched = True
        self._ending = 0
        if itl_target_ms > 0.0 and decodes:
            alone_ms = model.decodes_ms(decodes)
            spare_ms = itl_target_ms / (1.0 + model.error) - alone_ms
            self._ms = max(spare_ms, MIN_PREFILL * alone_ms)

    def take(self, request: Request) -> int:
        """How many tokens of the request this step computes; 0 when too little is left.

        The first one always gets a little: without that, nothing would ever end.
        """
        wanted = min(request.debt, self._tokens)
        if wanted <= 0:
            return 0
        count = min(wanted, self._affordable(request.computed))
        if count < request.debt and self._delays_more_than_it_saves(request.computed, count):
            return 0
        least = min(wanted, MIN_CHUNK_TOKENS)
        if count < least:
            if not self._untouched:
                return 0
            count = least
        self._untouched = False
        self._ending += count == request.debt
        self._tokens -= count
        self._ms -= self._fit.predict_ms(request.computed, count) - self._fit.a
        return count

    def _delays_more_than_it_saves(self, start: int, count: int) -> bool:
        """Prompts that end with this step wait for all of it; without the piece of another one that
        goes on anyway it is over sooner, for one more step; what that costs must be known."""
        if self._fit.confidence < SURE_CONFIDENCE:
            return False
        piece_ms = self._fit.predict_ms(start, count) - self._fit.a
        return self._ending * piece_ms > self._fit.a

    def _affordable(self, start: int) -> int:
        """The most tokens behind `start` that fit into the time that is left."""
        if self._ms == math.inf:
            return self._tokens
        if self._ms <= 0.0:
            return 0
        slope = self._fit.b + self._fit.c * (start + 0.5)
        square = self._fit.c / 2
        if square * self._ms <= 1e-9 * slope * slope:
            # A fit of nearly nothing may say that prefill takes no time at all.
            return self._tokens if slope * self._tokens <= self._ms else int(self._ms / slope)
        return int((math.sqrt(slope * slope + 4 * square * self._ms) - slope) / (2 * square))
