"""What one request would cost on each replica, in milliseconds: the terms of the choice.

Pure arithmetic over the replicas' published time models, their load, and what this router has
booked there beyond it, for all replicas of a pool at once. The lowest cost wins; what is shown are
these very terms. This is the text to read, and what runs where no compiler is; a test holds the
kernel (cost.cpp) to the same results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvstore.identity import KeyChain
from router.choice.reserve import SIZES
from router.choice.sheet import (
    BARRED,
    BEST,
    BREAKER,
    EVIDENCE,
    FIT,
    MIN_MATCH_TOKENS,
    NOT_ASKED,
    ROW,
    TERMS,
    TOO_LONG,
    UNHEARD,
    Below,
    Demand,
    Prices,
    Sheet,
)
from router.fleet.fetches import FetchRun
from router.fleet.member import SUSPECT_LOAD_AGE_S
from router.locality.index import Seats
from router.locality.optimistic import PromiseSeats

OWN_DECODE_WEIGHT = 0.03
"""A ms of slower decoding, spread over the answer, hurts less than a ms before its first token."""
HARM_WEIGHT = 0.05
BUSY_WEIGHT = 2.0
CROWD_WEIGHT = 1
MIN_IDLE = 0.05
MAX_OCCUPANCY_WEIGHT = 4.0
"""Who comes next waits for this prefill too, so a ms of the engine costs more than itself: by as
many as wait in a queue, rho^2 / (1 - rho) on average where prefills take rho of the fleet's time,
and by more when even the shortest queue is long. On an idle fleet nobody comes next, and siblings
of a cold prefix compute it on every replica at once; on a busy one they wait for it."""

REUSE_GUESS = 0.5
REUSE_GUESS_TOKENS = 10_000
"""Before the fleet has seen so many prompt tokens, its hit ratio says little."""

LATENESS_WEIGHT = 4.0
SUSPECT_MS = 250.0
MAX_BACKLOG_AGEING_MS = 500.0
FRESH_DIGEST_S = 5.0
DIGEST_HALF_LIFE_S = 15.0
FETCH_MARGIN = 0.7
"""Fetching must beat computing by so much, as kvstore/cascade.py decides at the replica itself."""

SOME_MS = 1e-3
"""What sums of booked prefills differ from nothing by, rounding apart."""
MIDDLE_MS = 2.0 * 4.0 ** np.arange(SIZES)
"""Of each class of sizes."""

WEIGHTS = np.array(
    [
        OWN_DECODE_WEIGHT, HARM_WEIGHT, BUSY_WEIGHT, CROWD_WEIGHT,
        MAX_OCCUPANCY_WEIGHT, LATENESS_WEIGHT, SUSPECT_MS, MAX_BACKLOG_AGEING_MS, FRESH_DIGEST_S,
        DIGEST_HALF_LIFE_S, MIN_IDLE, SOME_MS, FETCH_MARGIN, REUSE_GUESS, REUSE_GUESS_TOKENS,
    ],
    np.float64,
)  # fmt: skip
"""As the kernel reads them."""

_SCORE, _TTFT, _OVERLAP = map(TERMS.index, ("score", "ttft_ms", "overlap_blocks"))
_EVIDENCE = [ROW.index(name) for name in EVIDENCE]


class NumpyPricer:
    """Prices without a compiler."""

    def look(self, sheet: Sheet, seats: Seats, chain: KeyChain, promises: PromiseSeats) -> None:
        sheet.there[:] = seats.depths_of(chain.data)
        sheet.depths[:] = sheet.there
        promises.count_in(chain, sheet.depths)

    def price(
        self,
        sheet: Sheet,
        demand: Demand,
        now_s: float,
        asked: np.ndarray | None = None,
        below: Below | None = None,
        startup_ms: np.ndarray | None = None,
    ) -> Prices:
        asked = sheet.everybody if asked is None else asked
        sheet.state[:] = _states(sheet.table, demand, asked, now_s)
        fit = np.flatnonzero(sheet.state == FIT)
        if not fit.size:
            return sheet.prices(0)
        rows, overlap = _Rows(sheet.table[fit]), sheet.depths[fit].astype(np.float64)
        reach, transfer_ms, waits = overlap, np.zeros(len(fit)), (sheet.depths > sheet.there)[fit]
        if below is not None:
            tiers = below.depths[:, fit], below.speeds[fit]
            reach, transfer_ms = fetched(rows.b, rows.c, overlap, *tiers, demand)
        first_ms = np.zeros(len(fit)) if startup_ms is None else startup_ms[fit]
        terms = _terms(rows, demand, overlap, reach, (transfer_ms, first_ms), waits, now_s)
        sheet.rows[: len(fit)], sheet.terms[: len(fit)] = fit, terms
        best = np.argsort(-terms[:, _SCORE], kind="stable")[:BEST]
        at = fit[best]
        lines = (best, at, terms[best], sheet.table[at][:, _EVIDENCE], sheet.there[at])
        sheet.lines[: len(best)] = np.column_stack(lines)
        sheet.answer[:4] = (
            terms[:, _TTFT].min(),
            rows.queued_tokens.min(),
            terms[:, _OVERLAP].max(),
            terms[best[1], _SCORE] if len(best) > 1 else -math.inf,
        )
        return sheet.prices(len(fit))

    def survey(
        self,
        sheet: Sheet,
        seats: Seats,
        chain: KeyChain,
        promises: PromiseSeats,
        demand: Demand,
        now_s: float,
        asked: np.ndarray | None = None,
        below: Below | None = None,
        startup_ms: np.ndarray | None = None,
    ) -> Prices:
        self.look(sheet, seats, chain, promises)
        return self.price(sheet, demand, now_s, asked, below, startup_ms)


class _Rows:
    """Columns of the table by their names."""

    def __init__(self, table: np.ndarray) -> None:
        for name, column in zip(ROW, table.T, strict=True):
            setattr(self, name, column)

    def prefill_ms(self, cached: np.ndarray | float, new: np.ndarray | float) -> np.ndarray:
        """As PrefillFit.predict_ms."""
        work = cached * new + new * (new + 1) / 2
        return np.maximum(0.0, self.a + self.b * new + self.c * work)

    def decode_ms(self, rows: np.ndarray | float, context: np.ndarray | float) -> np.ndarray:
        """As DecodeFit.predict_ms."""
        return np.maximum(0.0, self.base + self.per_row * rows + self.per_context * context)

    def queue_ms(self, now_s: float) -> np.ndarray:
        """A published backlog shrinks while nobody reports."""
        age_ms = np.minimum(MAX_BACKLOG_AGEING_MS, 1e3 * (now_s - self.load_at_s))
        return np.maximum(0.0, self.backlog_ms - age_ms) + self.unseen_prefill_ms

    def credit(self, now_s: float) -> np.ndarray:
        """How much of a match counts, in [0, 1]: trust, and the age of the digest."""
        stale_s = np.maximum(0.0, now_s - self.digest_at_s - FRESH_DIGEST_S)
        faded = self.trust * np.exp2(-stale_s / DIGEST_HALF_LIFE_S)
        return np.where(self.unknown != 0, self.trust, faded)


def _states(table: np.ndarray, demand: Demand, asked: np.ndarray, now_s: float) -> np.ndarray:
    """Who may take it. While some are heard, who is not may well hang; where nobody is, it is the
    bus that is silent."""
    at = _Rows(table)
    needed = math.ceil((demand.prompt_tokens + 1) / demand.block_tokens)
    too_long = (demand.prompt_tokens >= at.context_limit) | (needed > at.total_blocks)
    state = np.select(
        [asked == 0, too_long, at.barred != 0, now_s < at.admits_from_s],
        [NOT_ASKED, TOO_LONG, BARRED, BREAKER],
        FIT,
    ).astype(np.uint8)
    unheard = (state == FIT) & (now_s - at.load_at_s > SUSPECT_LOAD_AGE_S)
    if unheard.sum() < (state == FIT).sum():
        state[unheard] = UNHEARD
    return state


def fetched(
    b: np.ndarray,
    c: np.ndarray,
    overlap: np.ndarray,
    depths: np.ndarray,
    speeds: np.ndarray,
    demand: Demand,
) -> tuple[np.ndarray, np.ndarray]:
    """Leading blocks on each device or brought there, and what the bringing takes in ms.

    For each run behind what is there already: from the nearest tier that has it, where that beats
    computing with a margin."""
    size, reach = demand.block_tokens, overlap
    most = (demand.prompt_tokens - 1) // size
    transfer_ms = np.zeros(len(reach))
    for depth, (latency_ms, block_ms) in zip(depths, speeds.transpose(1, 2, 0), strict=True):
        count = np.minimum(most, depth) - reach
        fetch_ms = latency_ms + count * block_ms
        done, fresh = reach * size, count * size
        compute_ms = b * fresh + c * (done * fresh + fresh * (fresh + 1) / 2)
        pays = (count > 0) & (fetch_ms <= FETCH_MARGIN * compute_ms)
        reach = np.where(pays, reach + count, reach)
        transfer_ms += np.where(pays, fetch_ms, 0.0)
    return reach, transfer_ms


def runs_of(
    b: float,
    c: float,
    overlap: int,
    depths: Sequence[int],
    speeds: Sequence[tuple[float, float]],
    numbers: Sequence[int],
    block_tokens: int,
    prompt_tokens: int,
) -> tuple[FetchRun, ...]:
    """What `fetched` would bring to one replica, run by run; `numbers` tell the tiers apart."""
    size, reach = block_tokens, overlap
    most, runs = (prompt_tokens - 1) // size, []
    for tier, depth, (latency_ms, block_ms) in zip(numbers, depths, speeds, strict=True):
        count = min(most, depth) - reach
        done, fresh = reach * size, count * size
        compute_ms = b * fresh + c * (done * fresh + fresh * (fresh + 1) / 2)
        if count > 0 and latency_ms + count * block_ms <= FETCH_MARGIN * compute_ms:
            runs.append(FetchRun(tier, done, done + fresh))
            reach += count
    return tuple(runs)


def _terms(
    at: _Rows,
    demand: Demand,
    overlap: np.ndarray,
    reach: np.ndarray,
    transfers_ms: tuple[np.ndarray, np.ndarray],
    waits: np.ndarray,
    now_s: float,
) -> np.ndarray:
    """`overlap`: leading blocks on the device; `reach`: with those that the first of `transfers_ms`
    brings, the second brings what else is needed; `waits`: where some of the former are still being
    computed."""
    prompt, block = demand.prompt_tokens, demand.block_tokens
    # The last token is computed, and so the block that it is in.
    cached = np.minimum((prompt - 1) // block, reach) * block
    short = cached < MIN_MATCH_TOKENS
    blocks_ms, startup_ms = transfers_ms
    transfer_ms = np.where(short, 0.0, blocks_ms) + startup_ms
    cached = np.where(short, 0.0, cached)
    reach, overlap = np.where(short, 0.0, reach), np.where(short, 0.0, overlap)
    backlog_ms, cold_ms = at.queue_ms(now_s), at.prefill_ms(0, prompt)
    warm_ms = np.minimum(cold_ms, at.prefill_ms(cached, prompt - cached))
    credit = at.credit(now_s)
    saved_ms = credit * (cold_ms - warm_ms)
    prefill_ms = cold_ms - saved_ms
    ahead, overtaken = _ahead(at, prefill_ms, waits)
    queue_ms = backlog_ms * ahead
    mixing_ms = _mixing_ms(at, at.queued_tokens * ahead + (prompt - cached))
    ttft_ms = queue_ms + prefill_ms + transfer_ms + mixing_ms
    blocks = math.ceil((prompt + demand.output_tokens) / block)
    needed = blocks - np.minimum(overlap, np.floor(cached / block))
    decode_share_ms = mixing_ms + _own_decode_ms(at, demand)
    occupancy = _occupancy(at.busy.mean(), backlog_ms.min(), cold_ms)
    harm_ms = prefill_ms * (occupancy + overtaken + HARM_WEIGHT * np.maximum(0.0, at.rows))
    eviction_ms = _eviction_ms(at, needed, block)
    overload_ms = _overload_ms(at, demand, needed, now_s)
    deadline_ms = math.inf if demand.ttft_deadline_ms is None else demand.ttft_deadline_ms
    lateness_ms = LATENESS_WEIGHT * np.maximum(0.0, ttft_ms - deadline_ms)
    cost_ms = queue_ms + prefill_ms + transfer_ms + decode_share_ms + harm_ms
    cost_ms = cost_ms + (eviction_ms + overload_ms + lateness_ms)
    score = cold_ms.min() - cost_ms
    return np.stack(
        [
            score, saved_ms, queue_ms, prefill_ms, transfer_ms, decode_share_ms, harm_ms,
            eviction_ms, overload_ms, lateness_ms, ttft_ms, reach, cached, needed, credit * cached,
        ],
        axis=1,
    )  # fmt: skip


def _occupancy(busy: float, crowd_ms: float, cold_ms: np.ndarray) -> np.ndarray:
    """What a ms of the engine is worth to those who come next."""
    steady = BUSY_WEIGHT * busy * busy / max(MIN_IDLE, 1.0 - busy)
    asked = np.where(cold_ms > 0, cold_ms, math.inf)
    return np.minimum(MAX_OCCUPANCY_WEIGHT, steady + CROWD_WEIGHT * crowd_ms / asked)


def _ahead(at: _Rows, prefill_ms: np.ndarray, waits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shortest first: the share of the backlog that is computed before this prefill, and how many
    prefills it goes before. Told by those whose sizes are known, in classes; where none is, and
    for who waits for blocks to come, it is all of the backlog."""
    sizes = np.stack([getattr(at, f"prefills_{size}_ms") for size in range(SIZES)], axis=1)
    size = np.clip(np.frexp(prefill_ms)[1] - 1, 0, 2 * SIZES - 1) // 2
    smaller = np.arange(SIZES) <= size[:, None]
    known = np.maximum(0.0, sizes)
    total = known.sum(axis=1)
    share = (known * smaller).sum(axis=1) / np.maximum(total, SOME_MS)
    overtaken = (known * ~smaller / MIDDLE_MS).sum(axis=1)
    return np.where(waits | (total <= SOME_MS), 1.0, share), np.where(waits, 0.0, overtaken)


def _mixing_ms(at: _Rows, tokens: np.ndarray) -> np.ndarray:
    """The running decodes share every step of the prefills ahead and of our own."""
    steps = np.ceil(tokens / at.step_tokens)
    step_ms = np.maximum(0.0, at.per_row * at.rows + at.per_context * at.context_tokens)
    return np.where(at.rows > 0, steps * step_ms, 0.0)


def _own_decode_ms(at: _Rows, demand: Demand) -> np.ndarray:
    alone = at.decode_ms(1, demand.prompt_tokens)
    shared = at.decode_ms(at.requests + 1, at.context_tokens + demand.prompt_tokens)
    return OWN_DECODE_WEIGHT * demand.output_tokens * np.maximum(0.0, shared - alone)


def _eviction_ms(at: _Rows, needed: np.ndarray, block_tokens: int) -> np.ndarray:
    """Cached blocks that must go, by what it takes to compute them again and how likely that is:
    where much of all prompts is found cached, what is cached is needed. The fuller a replica, the
    sooner it must evict, so room that is left elsewhere is used first. The likelihood is the whole
    fleet's: by its own one, whoever finds little cached would get all that is new, and find still
    less, while the others' caches grow stale."""
    free = np.maximum(0.0, at.free_blocks)
    full = 1.0 - np.minimum(1.0, free / np.maximum(1.0, at.total_blocks))
    evicted = np.minimum(at.cached_blocks, np.maximum(needed - free, needed * (full * full)))
    told = (at.unreported == 0) & (needed > 0)
    cached = at.prompts_cached.sum() + REUSE_GUESS * REUSE_GUESS_TOKENS
    reused = min(1.0, cached / (at.prompts_seen.sum() + REUSE_GUESS_TOKENS))
    return np.where(told, reused * at.b * evicted * block_tokens, 0.0)


def _overload_ms(at: _Rows, demand: Demand, needed: np.ndarray, now_s: float) -> np.ndarray:
    """Waiting for a running slot, computing again what lack of KV preempts, and suspicion."""
    slots = np.maximum(1.0, at.max_running)
    ahead = np.maximum(0.0, at.requests + 1 - slots)
    step_ms = at.decode_ms(np.minimum(slots, at.requests), at.context_tokens)
    slot_ms = ahead / slots * demand.output_tokens * step_ms
    short = np.maximum(0.0, needed - np.maximum(0.0, at.free_blocks) - at.cached_blocks)
    short_ms = 2.0 * at.b * short * demand.block_tokens
    suspect = (at.unreported != 0) | (at.failures != 0)
    suspect |= now_s - at.load_at_s > SUSPECT_LOAD_AGE_S
    return slot_ms + short_ms + np.where(suspect, SUSPECT_MS * np.maximum(1.0, at.failures), 0.0)
