"""Who may be asked by what it is there for: one prices the others where these can't.

A role is a preference. Those that compute prompts for others answer nobody while those that answer
keep up: where tokens would come sooner between the prompts of one that computes, there are too many
of the latter, and they answer too. Those that answer get no long cold prompt
while one that does both can take it; what a hand-off brings them is not cold.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from router.choice.route import RouteQuery
from router.choice.sheet import FIT, ROW, TERMS, Prices
from router.fleet.board import Board

SOONER = 1.1
"""By so much tokens must come sooner where prompts are computed: next prompts come there first."""

FULL = 3.0
"""Where there is no seat, a token comes so many times later: others end first."""

_CACHED = TERMS.index("cached_tokens")
_PACE = [
    ROW.index(name)
    for name in (
        "base", "per_row", "per_context", "rows", "context_tokens", "busy",
        "b", "step_tokens", "requests", "max_running",
    )
]  # fmt: skip

LEAST_MS = 1e-3
"""Of a step: before anything was learnt it may be said to take no time."""

Price = Callable[[np.ndarray | None], Prices]
"""Prices whoever is asked, uint8 (n,), or everybody."""


def price_by_role(
    board: Board, query: RouteQuery, asked: np.ndarray, long_tokens: int, price: Price
) -> tuple[Prices, np.ndarray]:
    """The prices of those that the role allows, and whom it bars: bool (n,)."""
    barred = ~board.prefill_only if query.computes else board.prefill_only
    prices = price(asked & ~barred)
    if query.computes:
        return prices, barred
    if not len(prices.terms):
        return price(asked), np.zeros_like(barred)
    helpers = helping(board, query.prompt_tokens, prices.state == FIT)
    if (asked & helpers).any():
        barred = barred & ~helpers
        prices = price(asked & ~barred)
    cold = _cold(board, query, prices, long_tokens)
    if not cold.any():
        return prices, barred
    barred = barred | cold
    return price(asked & ~barred), barred


def helping(board: Board, prompt_tokens: int, fit: np.ndarray) -> np.ndarray:
    """Those that compute prompts, where the tokens of an answer come sooner than from any of the
    others that are `fit`, bool (n,)."""
    token_ms = _token_ms(board, prompt_tokens)
    soonest_ms = token_ms[fit & ~board.prefill_only].min(initial=np.inf)
    return board.prefill_only & (SOONER * token_ms < soonest_ms)


def _token_ms(board: Board, prompt_tokens: int) -> np.ndarray:
    """Between two tokens of one more answer, in the mean over time: in the share of it that prompts
    take, a token comes with each piece of a prompt."""
    base, per_row, per_context, rows, context, busy, b, piece, requests, seats = board.table[
        :, _PACE
    ].T
    step_ms = base + per_row * (rows + 1) + per_context * (context + prompt_tokens)
    step_ms = np.maximum(LEAST_MS, step_ms)
    token_ms = 1.0 / ((1.0 - busy) / step_ms + busy / (step_ms + b * piece))
    return np.where(requests >= seats, FULL * token_ms, token_ms)


def _cold(board: Board, query: RouteQuery, prices: Prices, long_tokens: int) -> np.ndarray:
    """Of those that answer only, who would have to compute much: where one that does both can, bool
    (n,). Who only helps out takes none of it away: it has prompts of its own.

    What is cold is told by the terms, so it takes a second pricing: of mixed fleets alone."""
    found = np.zeros(len(prices.state), bool)
    fit = np.flatnonzero(prices.state == FIT)
    answering = board.decode_only[fit]
    if (~answering & ~board.prefill_only[fit]).any():
        computed = query.prompt_tokens - prices.terms[:, _CACHED]
        found[fit[answering & (computed >= long_tokens)]] = True
    return found
