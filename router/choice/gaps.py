"""Gaps between the tokens of answers: what was promised of them, and what they come to."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from router.choice.sheet import ROW
from router.fleet.board import Board

WELL_WITHIN = 0.4
"""Of a promise: gaps are foretold in the mean and for now, and it is the answers that meet more
prompts than others that miss it."""

URGENCY = 2.0
MOST_URGENT = 10.0
"""What an answer's delay weighs grows with the gaps foretold, to this power, up to so much: above
one, since whoever computes in between is later with all that follows, and has more to answer at
once."""

KEPT_S = 60.0
"""A promise, since the last request that got it."""

MAX_POOLS = 64

LEAST_MS = 1e-3
"""Of a step: before anything was learnt it may be said to take no time."""

FULL = 3.0
"""Where there is no seat, a token comes so many times later: others end first."""

_PACE_OF = ("base", "per_row", "per_context", "rows", "context_tokens", "b", "step_tokens")
_PACE = [ROW.index(name) for name in _PACE_OF]
_TAKEN_OF = ("busy", "requests", "max_running", "backlog_ms", "unseen_prefill_ms")
_TAKEN = [ROW.index(name) for name in _TAKEN_OF]


class Promise(NamedTuple):
    """The tightest objective for gaps somewhere, and how long answers are there."""

    itl_ms: float = math.inf
    answer_tokens: float = 0.0

    @property
    def life_ms(self) -> float:
        """How long an answer may take."""
        return max(1.0, self.answer_tokens) * self.itl_ms


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


def next_answer_ms(
    board: Board,
    prompt_tokens: int,
    work_ms: np.ndarray | float = 0.0,
    life_ms: float = math.inf,
    busy: np.ndarray | None = None,
) -> np.ndarray:
    """Between two tokens of one more answer at each replica, in the mean over time, float64 (n,):
    in the share of it that prompts take, a token comes with each piece of a prompt. That share is
    what it was lately (or `busy`, float64 (n,)), and what the prompts that wait and `work_ms` more
    take of `life_ms`."""
    step_ms, piece_ms = _step_ms(board, prompt_tokens)
    lately, requests, seats, backlog, unseen = board.table[:, _TAKEN].T
    busy = lately if busy is None else busy
    coming = np.minimum(1.0, (backlog + unseen + work_ms) / life_ms)
    share = 1.0 - (1.0 - busy) * (1.0 - coming)
    between_ms = 1.0 / ((1.0 - share) / step_ms + share / piece_ms)
    return np.where(requests >= seats, FULL * between_ms, between_ms)


def longest_ms(board: Board, prompt_tokens: int) -> np.ndarray:
    """The same if prompts never ended, float64 (n,)."""
    return _step_ms(board, prompt_tokens)[1]


def urgency(board: Board, work_ms: np.ndarray, promise: Promise) -> np.ndarray:
    """What a ms weighs for which a prompt of `work_ms`, float64 (n,), keeps an answer waiting at
    each replica, float64 (n,): nothing where no prompt can break the promise."""
    used = next_answer_ms(board, 0, work_ms, promise.life_ms) / (WELL_WITHIN * promise.itl_ms)
    weights = np.minimum(MOST_URGENT, used**URGENCY)
    return np.where(longest_ms(board, 0) <= promise.itl_ms, 0.0, weights)


def _step_ms(board: Board, prompt_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """A step of one more answer, and one with a piece of a prompt in it: as long a piece as a
    replica takes, which may aim at a step's time. Each float64 (n,)."""
    base, per_row, per_context, rows, context, b, piece = board.table[:, _PACE].T
    step_ms = base + per_row * (rows + 1) + per_context * (context + prompt_tokens)
    step_ms = np.maximum(LEAST_MS, step_ms)
    return step_ms, np.maximum(step_ms, np.minimum(board.target_ms, step_ms + b * piece))
