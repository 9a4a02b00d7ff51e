"""Gaps between the tokens of answers: what was promised of them, and what they come to."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from router.choice.sheet import ROW
from router.fleet.board import Board

WELL_WITHIN = 0.33
"""Of a promise: gaps are foretold in the mean and for now, and it is the answers that meet more
prompts than others that miss it."""

KEPT_S = 60.0
"""A promise, since the last request that got it."""

MAX_POOLS = 64

LEAST_MS = 1e-3
"""Of a step: before anything was learnt it may be said to take no time."""

FULL = 3.0
"""Where there is no seat, a token comes so many times later: others end first."""

_PACE_OF = (
    "base", "per_row", "per_context", "rows", "context_tokens", "busy", "b", "step_tokens",
    "requests", "max_running",
)  # fmt: skip
_PACE = [ROW.index(name) for name in _PACE_OF]


class _Asked(NamedTuple):
    itl_ms: float
    at_s: float


class Promises:
    """Of each pool the tightest objective that requests had lately: answers without one may run
    beside others that have one."""

    def __init__(self) -> None:
        self._pools: dict[str, _Asked] = {}

    def note(self, pool: str, itl_ms: float | None, now_s: float) -> None:
        """A request with that objective was placed there."""
        room = pool in self._pools or len(self._pools) < MAX_POOLS
        if itl_ms is not None and room and itl_ms <= self.of(pool, now_s):
            self._pools[pool] = _Asked(itl_ms, now_s)

    def of(self, pool: str, now_s: float) -> float:
        """In ms; infinity where there is none."""
        known = self._pools.get(pool)
        if known is None or now_s - known.at_s > KEPT_S:
            return math.inf
        return known.itl_ms


def next_answer_ms(board: Board, prompt_tokens: int) -> np.ndarray:
    """Between two tokens of one more answer at each replica, in the mean over time, float64 (n,):
    in the share of it that prompts take, a token comes with each piece of a prompt."""
    base, per_row, per_context, rows, context, busy, b, piece, requests, seats = board.table[
        :, _PACE
    ].T
    step_ms = base + per_row * (rows + 1) + per_context * (context + prompt_tokens)
    step_ms = np.maximum(LEAST_MS, step_ms)
    between_ms = 1.0 / ((1.0 - busy) / step_ms + busy / (step_ms + b * piece))
    return np.where(requests >= seats, FULL * between_ms, between_ms)
