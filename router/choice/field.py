"""Everybody of a pool, priced for one query: what a policy sees, what a reservation needs of the
one that it chooses, and what is kept to be shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter

import numpy as np
from msgspec import Struct

from events.decision import CandidateTerms
from router.choice.cost import runs_of
from router.choice.gaps import Promise, urgency
from router.choice.route import RouteQuery
from router.choice.sheet import (
    BEST,
    EVIDENCE,
    FIT,
    LINE,
    ROW,
    TERMS,
    TOO_LONG,
    UNHEARD,
    Below,
    Prices,
)
from router.choice.shown import LINE_EVIDENCE, LINE_ROW, LINE_TERMS, Shown, ShownOfPools
from router.fleet.board import Board, adapter_fails
from router.fleet.fetches import FetchRun
from router.fleet.member import Member
from router.policies.base import Candidate, Candidates

SHOWN = BEST
"""Replicas that a decision tells the terms of."""

NOTHING_PROMISED = Promise()

_QUEUED = ROW.index("queued_tokens")
_RUNNING = ROW.index("rows")
_CACHED, _OVERLAP, _OWN = map(TERMS.index, ("cached_tokens", "overlap_blocks", "prefill_ms"))
_EVIDENCE = [ROW.index(name) for name in EVIDENCE]
_LOAD = ("requests", "queued_tokens", "total_blocks", "free_blocks", "cached_blocks")
_PRICE = (
    "ttft_ms", "new_blocks", "cached_tokens", "usable_tokens", "transfer_ms", "overlap_blocks",
)  # fmt: skip
_speed_of = itemgetter(*map(ROW.index, ("b", "c")))
_load_of = itemgetter(*map(ROW.index, _LOAD))
_price_of = itemgetter(*map(TERMS.index, _PRICE))


class Scored(Struct, frozen=True):
    """What the decision and its reservation need of a candidate; `new_blocks` is KV beyond what is
    cached. `fetched`: the part of `cached_tokens` that would come from the tiers below its device,
    if nothing were there but what its digest shows: what is only on its way may be gone again."""

    member: Member
    ttft_ms: float
    new_blocks: int
    cached_tokens: int
    usable_tokens: int
    overlap_blocks: int
    queued_tokens: int
    digest_blocks: int
    fetched: tuple[FetchRun, ...]


class Field(Candidates):
    """Everybody of the pool: those that may take the request, whom a policy sees, and why the
    others may not.

    True of the moment of its survey: use it before anything else changes."""

    def __init__(
        self,
        board: Board,
        query: RouteQuery,
        now_s: float,
        prices: Prices,
        below: Below | None,
        adapter_ms: np.ndarray | None,
        barred: np.ndarray | None,
        promise: Promise = NOTHING_PROMISED,
    ) -> None:
        """Over the board's sheet. `adapter_ms`: how long its adapter takes, float64 (n,), inf where
        there is none. `barred`: by their role, bool (n,). `promise`: what
        answers there may have."""
        self._board = board
        self._query = query
        self._now_s = now_s
        self._below = below
        self._adapter_ms = adapter_ms
        self._barred = barred
        self._promise = promise
        self._made = {}
        self._state, self._rows = prices.state, prices.rows
        self.terms, self._lines, self.best = prices.terms, prices.lines, prices.best
        self.longest_blocks = int(prices.best.longest_blocks)
        self.may_fetch = below is not None or adapter_ms is not None
        self._all = prices.everybody
        self.replicas = board.replicas
        if not self._all:
            self.replicas = [board.replicas[row] for row in prices.rows.tolist()]

    def scored(self, replica: str) -> Scored:
        """One of the candidates."""
        row, best = self._board.rows[replica], self.best
        if row == best.row:
            return Scored(
                self._board.members[row],
                best.ttft_ms,
                int(best.new_blocks),
                int(best.cached_tokens),
                int(best.usable_tokens),
                int(best.overlap_blocks),
                int(best.queued_tokens),
                int(best.digest_blocks),
                self._fetched(row, best.transfer_ms, best.overlap_blocks),
            )
        terms, board = self.terms[self._place(row)].tolist(), self._board
        ttft_ms, new, cached, usable, transfer_ms, overlap = _price_of(terms)
        return Scored(
            board.members[row],
            ttft_ms,
            int(new),
            int(cached),
            int(usable),
            int(overlap),
            int(board.table[row, _QUEUED]),
            int(board.sheet.there[row]),
            self._fetched(row, transfer_ms, overlap),
        )

    def _fetched(self, row: int, transfer_ms: float, overlap: float) -> tuple[FetchRun, ...]:
        below, query = self._below, self._query
        shown = int(self._board.sheet.there[row])
        if below is None or (transfer_ms <= 0 and overlap <= shown):
            return ()
        b, c = _speed_of(self._board.table[row].tolist())
        depths, speeds = below.depths[:, row].tolist(), below.speeds[row].tolist()
        numbers = self._board.stores.numbers
        size, prompt_tokens = query.block_tokens, query.prompt_tokens
        return runs_of(b, c, shown, depths, speeds, numbers, size, prompt_tokens)

    def delays_ms(self) -> np.ndarray:
        """What the answers that run at each candidate, and the next one where only answers are
        given, wait for the prompt together, float64 (fit,). The nearer gaps come to what was
        promised, the more it counts."""
        if math.isinf(self._promise.itl_ms):
            return np.zeros(len(self.replicas))
        board, rows = self._board, self._rows
        answers = np.maximum(0.0, board.table[rows, _RUNNING]) + board.decode_only[rows]
        work_ms = np.zeros(len(board.members))
        work_ms[rows] = self.terms[:, _OWN]
        weights = urgency(board, work_ms, self._promise)
        delays_ms: np.ndarray = answers * work_ms[rows] * weights[rows]
        return delays_ms

    def most_cached_tokens(self) -> int:
        """Of the prompt, where most of it is warm; 0 where nobody may take it."""
        return int(self.terms[:, _CACHED].max(initial=0.0))

    def shown(self, first: str | None = None) -> Sequence[CandidateTerms]:
        """At most `SHOWN` of each pool: `first`, then the best of the other candidates, then of
        those that may not the unfit by id, at last the unheard."""
        own, query = self._shown(first), self._query
        return ShownOfPools([(query.pool, own), *query.beside]) if query.beside else own

    def _shown(self, first: str | None) -> Shown:
        board = self._board
        why, lines = [], self._lines
        lead = -1 if first is None else board.rows[first]
        all_told = len(lines) == len(self.replicas)
        if first is not None and not all_told and lead not in lines[:, LINE_ROW].tolist():
            lines = np.concatenate((lines[:-1], self._line(lead)))
        if len(lines) < SHOWN and not self._all:
            unfit = self._filtered()[: SHOWN - len(lines)]
            why = [self._why(row) for row in unfit.tolist()]
            lines = np.concatenate((lines, self._bare(unfit)))
        return Shown(board.replicas, lines.tobytes(), lead, why, self._now_s)

    def _line(self, row: int) -> np.ndarray:
        """A candidate's, as the pricing tells of the best: float64 (1, len(LINE))."""
        line, place = self._bare(np.array([row])), self._place(row)
        line[0, LINE_TERMS] = self.terms[place]
        return line

    def _bare(self, rows: np.ndarray) -> np.ndarray:
        """Lines without terms."""
        lines = np.zeros((len(rows), len(LINE)))
        lines[:, LINE_ROW] = rows
        lines[:, LINE_EVIDENCE] = self._board.table[rows][:, _EVIDENCE]
        return lines

    def reasons(self) -> set[str]:
        """Why those may not."""
        return {self._why(row) for row in self._filtered().tolist()}

    def _place(self, row: int) -> int:
        """Among the candidates."""
        return row if self._all else int(self._rows.searchsorted(row))

    def _filtered(self) -> np.ndarray:
        (unfit,) = ((self._state != FIT) & (self._state != UNHEARD)).nonzero()
        (unheard,) = (self._state == UNHEARD).nonzero()
        return np.concatenate((unfit, unheard))

    def _make(self, place: int) -> Candidate:
        row = int(self._rows[place])
        requests, queued, total, free, cached = _load_of(self._board.table[row].tolist())
        return Candidate(
            replica=self._board.replicas[row],
            overlap_blocks=int(self.terms[place, _OVERLAP]),
            requests=int(requests),
            queued_prefill_tokens=int(queued),
            used_blocks=int(total - free - cached),
            total_blocks=int(total),
        )

    def _why(self, row: int) -> str:
        member, query = self._board.members[row], self._query
        if query.pin is not None and member.replica != query.pin:
            return "not_pinned"
        if member.replica in query.exclude:
            return "excluded"
        adapter_ms = self._adapter_ms
        if query.adapter is not None and adapter_ms is not None and adapter_ms[row] == math.inf:
            return "adapter_failing" if adapter_fails(member, query.adapter) else "adapter"
        if self._barred is not None and self._barred[row]:
            return "role"
        if self._state[row] == TOO_LONG:
            return "too_long"
        return member.unavailable(self._now_s) or "unheard"
