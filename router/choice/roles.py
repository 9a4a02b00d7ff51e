"""Who may be asked by what it is there for: one prices the others where these can't.

Those that compute prompts for others answer nobody while anybody else can. Those that answer get no
long cold prompt while one that does both can take it; what a hand-off brings them is not cold.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from router.choice.cost import FIT, TERMS, Prices
from router.choice.route import RouteQuery
from router.fleet.board import Board

_CACHED = TERMS.index("cached_tokens")

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
    cold = _cold(board, query, prices, long_tokens)
    if not cold.any():
        return prices, barred
    barred = barred | cold
    return price(asked & ~barred), barred


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
