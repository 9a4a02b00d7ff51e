"""Who may be asked by what it is there for: one prices the others where these can't.

A role is a preference, worth as much as what was promised of the gaps between an answer's tokens.
Where nothing was, or no prompt can break it, roles only break ties: whoever is cheapest computes
and answers, as if all did both. Else those that compute prompts for others answer nobody while
those that answer keep up, however little they have to do just now: their next prompts would meet
those answers. Only those that have had little to do for long answer all the same. And those that
answer get no long cold prompt while one that does both can take it. What a hand-off brings them is
not cold.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from router.choice.gaps import WELL_WITHIN, Promise, longest_ms, next_answer_ms
from router.choice.route import RouteQuery
from router.choice.sheet import FIT, ROW, TERMS, Prices
from router.fleet.board import Board

IDLE_WITHIN = 0.33
"""Of a promise: who has had so little to compute that an answer's gaps would stay within it is not
needed for prompts."""

MUCH_SOONER = 2.0
"""Where those that answer don't keep up, others must be so much better to help."""

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
    promise: Promise,
    price: Price,
) -> tuple[Prices, np.ndarray]:
    """The prices of those that the role allows, and whom it bars: bool (n,). `promise`: what
    answers there may have; `seat_share` of what one that answers runs at once is all that it is
    sent."""
    if query.computes:
        return price(asked & board.prefill_only), ~board.prefill_only
    barred = np.zeros_like(board.prefill_only)
    if query.itl_deadline_ms is not None:
        own, anybody = promise._replace(itl_ms=query.itl_deadline_ms), asked != 0
        share = seat_share if query.prompt_tokens >= long_tokens else math.inf
        helpers = helping(board, query.prompt_tokens, anybody, own, share)
        barred = board.prefill_only & ~helpers
    prices = price(asked & ~barred)
    if not len(prices.terms):
        return price(asked), np.zeros_like(barred)
    cold = _cold(board, query, prices, long_tokens)
    others = (board.prefill_only & ~barred) | cold
    waits = cold & (next_answer_ms(board, 0) > WELL_WITHIN * promise.itl_ms)
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
    promise: Promise,
    seat_share: float = math.inf,
) -> np.ndarray:
    """Those that compute prompts and may answer all the same, bool (n,): where they keep what was
    promised whatever they compute, or have had little to compute; and where the others that are
    `fit`, bool (n,), don't keep up: they don't keep well within it and are much slower, or all have
    `seat_share` of what they run at once. What nobody may be handed any more would be computed by
    them, and who is too slow would be slower still."""
    rest, well_ms = fit & ~board.prefill_only, WELL_WITHIN * promise.itl_ms
    token_ms = next_answer_ms(board, prompt_tokens, 0.0, promise.life_ms, board.told_share)
    soonest_ms = token_ms[rest].min(initial=np.inf)
    answering = board.table[rest]
    sooner = (soonest_ms > well_ms) & (MUCH_SOONER * token_ms < soonest_ms)
    full = (answering[:, _REQUESTS] >= seat_share * answering[:, _SEATS]).all()
    idle = token_ms <= IDLE_WITHIN * promise.itl_ms
    kept = (longest_ms(board, prompt_tokens) <= promise.itl_ms) | idle
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
