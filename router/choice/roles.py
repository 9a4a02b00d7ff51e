"""Who may be asked by what it is there for: one prices the others where these can't.

A role is a preference. Those that compute prompts for others answer nobody while those that answer
keep up: where these have become so slow that tokens would come much sooner between two prompts of
one that computes, there are too many of the latter, and they answer too. Those that answer get no
long cold prompt while one that does both can take it; what a hand-off brings them is not cold.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from router.choice.route import RouteQuery
from router.choice.sheet import FIT, ROW, TERMS, Prices
from router.fleet.board import Board

SOONER = 1.5
"""By so much tokens must come sooner where prompts are computed: what they are spared elsewhere
comes back as soon as prompts come."""

MIN_FREE = 0.05

_CACHED = TERMS.index("cached_tokens")
_STEP = [ROW.index(name) for name in ("base", "per_row", "per_context", "rows", "context_tokens")]
_BUSY = ROW.index("busy")

Price = Callable[[np.ndarray], Prices]
"""Prices whoever is asked, uint8 (n,)."""


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
    helping = _helping(board, query, prices)
    if (asked & helping).any():
        barred = barred & ~helping
        prices = price(asked & ~barred)
    cold = _cold(board, query, prices, long_tokens)
    if not cold.any():
        return prices, barred
    barred = barred | cold
    return price(asked & ~barred), barred


def _helping(board: Board, query: RouteQuery, prices: Prices) -> np.ndarray:
    """Those that compute prompts, where tokens come much sooner than wherever else, bool (n,)."""
    base, per_row, per_context, rows, context = board.table[:, _STEP].T
    step_ms = base + per_row * (rows + 1) + per_context * (context + query.prompt_tokens)
    # Of the time that prompts take no token comes.
    token_ms = step_ms / np.maximum(MIN_FREE, 1.0 - board.table[:, _BUSY])
    soonest_ms = token_ms[prices.state == FIT].min()
    return board.prefill_only & (SOONER * token_ms < soonest_ms)


def _cold(board: Board, query: RouteQuery, prices: Prices, long_tokens: int) -> np.ndarray:
    """Of those that answer only, who would have to compute much: where another one can, bool (n,).

    What is cold is told by the terms, so it takes a second pricing: of mixed fleets alone."""
    found = np.zeros(len(prices.state), bool)
    fit = np.flatnonzero(prices.state == FIT)
    answering = board.decode_only[fit]
    if answering.any() and not answering.all():
        computed = query.prompt_tokens - prices.terms[:, _CACHED]
        found[fit[answering & (computed >= long_tokens)]] = True
    return found
