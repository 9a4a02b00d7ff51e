"""Who may be asked by what it is there for: one prices the others where these can't.

A role is a preference, worth as much as what was promised of the gaps between an answer's tokens.
Where nothing was, or no prompt can break it, roles only break ties: whoever is cheapest computes
and answers, as if all did both. Else those that compute prompts for others answer nobody while
those that answer keep up, however little they have to do just now: their next prompts would meet
those answers. And these get no long cold prompt while one that does both can take it. What a
hand-off brings them is not cold.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from router.choice.gaps import WELL_WITHIN, longest_ms, next_answer_ms
from router.choice.route import RouteQuery
from router.choice.sheet import FIT, ROW, TERMS, Prices
from router.fleet.board import Board

MUCH_SOONER = 2.0
"""Where those that answer miss the promise, others must be so much better to help."""

TIE_SHARE, TIE_MS = 0.02, 1.0
"""Of a prompt's prefill, and at least: no difference that can be known."""

_SCORE, _SAVED, _PREFILL, _CACHED = map(
    TERMS.index, ("score", "saved_prefill_ms", "prefill_ms", "cached_tokens")
)

_REQUESTS, _SEATS = map(ROW.index, ("requests", "max_running"))

Price = Callable[[np.ndarray | None], Prices]
"""Prices whoever is asked, uint8 (n,), or everybody."""


def price_by_role(
    board: Board,
    query: RouteQuery,
    asked: np.ndarray,
    long_tokens: int,
    seat_share: float,
    promised_ms: float,
    price: Price,
) -> tuple[Prices, np.ndarray]:
    """The prices of those that the role allows, and whom it bars: bool (n,). `promised_ms`: the
    tightest objective of answers there, infinity for none; `seat_share` of what one that answers
    runs at once is all that it is sent."""
    if query.computes:
        return price(asked & board.prefill_only), ~board.prefill_only
    barred = np.zeros_like(board.prefill_only)
    if query.itl_deadline_ms is not None:
        own_ms, anybody = query.itl_deadline_ms, asked != 0
        share = seat_share if query.prompt_tokens >= long_tokens else math.inf
        helpers = helping(board, query.prompt_tokens, anybody, own_ms, share)
        barred = board.prefill_only & ~helpers
    prices = price(asked & ~barred)
    if not len(prices.terms):
        return price(asked), np.zeros_like(barred)
    cold = _cold(board, query, prices, long_tokens)
    others = (board.prefill_only & ~barred) | cold
    waits = cold & (next_answer_ms(board, 0) > WELL_WITHIN * promised_ms)
    if waits.any() and _does_both(board, prices):
        barred = barred | waits
        prices = price(asked & ~barred)
    if not _tie(prices, others):
        return prices, barred
    barred = barred | others
    return price(asked & ~barred), barred


def helping(
    board: Board,
    prompt_tokens: int,
    fit: np.ndarray,
    promised_ms: float,
    seat_share: float = math.inf,
) -> np.ndarray:
    """Those that compute prompts and may answer all the same, bool (n,): where they keep what was
    promised whatever they compute, or the others that are `fit`, bool (n,), don't keep up: they
    miss it and are much slower, or all have `seat_share` of what they run at once. What nobody may
    be handed any more would be computed by them, and who is too slow would be slower still."""
    kept = longest_ms(board, prompt_tokens) <= promised_ms
    rest = fit & ~board.prefill_only
    token_ms, answering = next_answer_ms(board, prompt_tokens), board.table[rest]
    soonest_ms = token_ms[rest].min(initial=np.inf)
    sooner = (soonest_ms > promised_ms) & (MUCH_SOONER * token_ms < soonest_ms)
    full = (answering[:, _REQUESTS] >= seat_share * answering[:, _SEATS]).all()
    helpers: np.ndarray = board.prefill_only & (kept | sooner | full)
    return helpers


def margin_ms(terms: np.ndarray) -> float:
    """What a role is worth where nothing else is at stake: of the cheapest one's terms."""
    return max(TIE_MS, TIE_SHARE * float(terms[_SAVED] + terms[_PREFILL]))


def _tie(prices: Prices, others: np.ndarray) -> bool:
    """Whether somebody else costs no more than the cheapest, who is one of these."""
    rest = ~others[prices.rows]
    if rest.all() or not rest.any():
        return False
    scores = prices.terms[:, _SCORE]
    best = int(scores.argmax())
    return bool(scores[rest].max() >= scores[best] - margin_ms(prices.terms[best]))


def _does_both(board: Board, prices: Prices) -> bool:
    return bool((~board.prefill_only & ~board.decode_only)[prices.rows].any())


def _cold(board: Board, query: RouteQuery, prices: Prices, long_tokens: int) -> np.ndarray:
    """Of those that answer only, who would have to compute much: bool (n,)."""
    found = np.zeros(len(prices.state), bool)
    fit = np.flatnonzero(prices.state == FIT)
    computed = query.prompt_tokens - prices.terms[:, _CACHED]
    found[fit[board.decode_only[fit] & (computed >= long_tokens)]] = True
    return found
