"""From a query to priced candidates: look up what each replica holds, filter and price it.

Changes nothing: the same code answers decide and explain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat
from operator import itemgetter
from typing import overload

import numpy as np
from msgspec import Struct

from events.decision import CandidateTerms
from router.choice.cost import runs_of
from router.choice.pricer import pricer
from router.choice.reserve import Ledger
from router.choice.roles import helping, price_by_role
from router.choice.route import RouteQuery
from router.choice.sheet import BEST, FIT, ROW, TERMS, TOO_LONG, UNHEARD, Below, Demand, Prices
from router.cluster.peers import Peers, together
from router.fleet.board import Board, adapter_fails
from router.fleet.fetches import FetchRun
from router.fleet.fleet import Fleet
from router.fleet.member import Member
from router.locality.optimistic import OptimisticEntries
from router.policies.base import Candidate, Candidates

SHOWN = BEST
"""Replicas that a decision tells the terms of."""

_BARRED = ROW.index("barred")
_OVERLAP, _CACHED = map(TERMS.index, ("overlap_blocks", "cached_tokens"))
_EVIDENCE = [ROW.index(name) for name in ("trust", "digest_at_s", "load_at_s", "unknown")]
_LOAD = ("requests", "queued_tokens", "total_blocks", "free_blocks", "cached_blocks")
_PRICE = ("ttft_ms", "new_blocks", "cached_tokens", "usable_tokens", "transfer_ms")
_speed_of = itemgetter(*map(ROW.index, ("b", "c")))
_load_of = itemgetter(*map(ROW.index, _LOAD))
_price_of = itemgetter(*map(TERMS.index, _PRICE))


class Scored(Struct, frozen=True):
    """What the reservation needs of a candidate; `new_blocks` is KV beyond what is cached.
    `fetched`: the part of `cached_tokens` that would come from the tiers below its device."""

    member: Member
    ttft_ms: float
    new_blocks: int
    cached_tokens: int
    usable_tokens: int
    fetched: tuple[FetchRun, ...]
    digest_blocks: int


class Look(Struct, frozen=True):
    """What was looked up for a query: leading blocks as the digests say, and with what is promised,
    int32 (n,); what lies below; how long its adapter takes, float64 (n,), inf where there is
    none."""

    demand: Demand
    digest_blocks: np.ndarray
    depths: np.ndarray
    below: Below | None
    adapter_ms: np.ndarray | None = None


class Field:
    """Everybody of the pool: those that may take the request, and why the others may not.

    True of the moment of its survey: use it before anything else changes."""

    def __init__(
        self,
        board: Board,
        query: RouteQuery,
        now_s: float,
        look: Look,
        prices: Prices,
        barred: np.ndarray | None = None,
    ) -> None:
        """`barred`: by their role, bool (n,)."""
        self._board = board
        self._query = query
        self._now_s = now_s
        self._look = look
        self._barred = barred
        terms, best, figures = prices.terms, prices.best, prices.figures
        self._state, self._terms, self._figures = prices.state, terms, figures
        self._fit, replicas = board.everywhere, board.replicas
        if len(terms) < len(replicas):
            self._fit = np.flatnonzero(prices.state == FIT)
            replicas = [replicas[row] for row in self._fit.tolist()]
        # What a policy sees.
        self.candidates = Candidates(replicas, terms, best, figures, self._candidate)

    def __len__(self) -> int:
        return len(self._terms)

    def scored(self, replica: str) -> Scored:
        """One of the candidates."""
        row = self._board.rows[replica]
        ttft_ms, new, cached, usable, transfer_ms = _price_of(self.candidates.row(self._place(row)))
        return Scored(
            member=self._board.members[row],
            ttft_ms=ttft_ms,
            new_blocks=int(new),
            cached_tokens=int(cached),
            usable_tokens=int(usable),
            fetched=self._fetched(row) if transfer_ms > 0 and self._look.below else (),
            digest_blocks=int(self._look.digest_blocks[row]),
        )

    def _fetched(self, row: int) -> tuple[FetchRun, ...]:
        below = self._look.below
        assert below is not None
        b, c = _speed_of(self._board.table[row].tolist())
        depths, speeds = below.depths[:, row].tolist(), below.speeds[row].tolist()
        numbers, overlap = self._board.stores.numbers, int(self._look.depths[row])
        return runs_of(b, c, overlap, depths, speeds, numbers, self._look.demand)

    def soonest_ms(self) -> float:
        """The shortest TTFT to be had."""
        return self._figures.soonest_ms

    def most_cached_tokens(self) -> int:
        """Of the prompt, where most of it is warm; 0 where nobody may take it."""
        return int(self._terms[:, _CACHED].max(initial=0.0))

    def least_queued_tokens(self) -> int:
        """The shortest queue, in prompt tokens to compute."""
        return int(self._figures.least_queued_tokens)

    def shown(self, first: str | None = None) -> Shown:
        """At most `SHOWN`: `first`, then the best of the other candidates, then of those that may
        not the unfit by id, at last the unheard."""
        places = self.candidates.best
        if first is not None:
            place = self._place(self._board.rows[first])
            if places[0] != place:
                places = [place, *[other for other in places if other != place]][:SHOWN]
        rows, terms = self._fit[places], self._terms[places]
        why: list[str] = []
        if len(places) < SHOWN and len(self._terms) < len(self._state):
            unfit = self._filtered()[: SHOWN - len(places)]
            why = [self._why(row) for row in unfit.tolist()]
            rows = np.concatenate((rows, unfit))
            terms = np.concatenate((terms, np.zeros((len(unfit), len(TERMS)))))
        return Shown(self._board, rows, terms, why, self._now_s)

    def reasons(self) -> set[str]:
        """Why those may not."""
        return {self._why(row) for row in self._filtered().tolist()}

    def _place(self, row: int) -> int:
        """Among the candidates."""
        return row if self._fit is self._board.everywhere else int(self._fit.searchsorted(row))

    def _filtered(self) -> np.ndarray:
        (unfit,) = ((self._state != FIT) & (self._state != UNHEARD)).nonzero()
        (unheard,) = (self._state == UNHEARD).nonzero()
        return np.concatenate((unfit, unheard))

    def _candidate(self, place: int) -> Candidate:
        row = int(self._fit[place])
        requests, queued, total, free, cached = _load_of(self._board.table[row].tolist())
        return Candidate(
            replica=self._board.replicas[row],
            overlap_blocks=int(self.candidates.row(place)[_OVERLAP]),
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
        adapter_ms = self._look.adapter_ms
        if query.adapter is not None and adapter_ms is not None and adapter_ms[row] == math.inf:
            return "adapter_failing" if adapter_fails(member, query.adapter) else "adapter"
        if self._barred is not None and self._barred[row]:
            return "role"
        if self._state[row] == TOO_LONG:
            return "too_long"
        return member.unavailable(self._now_s) or "unheard"


class Shown(Sequence[CandidateTerms]):
    """What is kept of a field to be shown. The structs are made when the first of them is read,
    which for most choices is after the request is on its way."""

    __slots__ = ("_evidence", "_made", "_names", "_now_s", "_rows", "_terms", "_why")

    def __init__(
        self, board: Board, rows: np.ndarray, terms: np.ndarray, why: list[str], now_s: float
    ) -> None:
        """`rows` of the board with their terms; why the last ones are no candidates."""
        self._names = board.replicas
        self._rows = rows
        self._terms = terms
        self._evidence = board.table[rows]
        self._why = why
        self._now_s = now_s
        self._made: list[CandidateTerms] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> CandidateTerms: ...

    @overload
    def __getitem__(self, index: slice) -> list[CandidateTerms]: ...

    def __getitem__(self, index: int | slice) -> CandidateTerms | list[CandidateTerms]:
        if self._made is None:
            self._made = self._make()
        return self._made[index]

    def _make(self) -> list[CandidateTerms]:
        """Column by column: a struct is quickly made, its numbers one by one are not."""
        trust, digest_at_s, load_at_s, unknown = self._evidence.T[_EVIDENCE]
        terms = self._terms.T.tolist()
        score, saved, queue, prefill, transfer, *others, _, overlap, _, _, _ = terms
        return list(
            map(
                CandidateTerms,
                [self._names[row] for row in self._rows.tolist()],
                score,
                saved,
                queue,
                prefill,
                transfer,
                *others,
                map(int, overlap),
                trust.tolist(),
                (1e3 * (self._now_s - digest_at_s)).tolist(),
                (1e3 * (self._now_s - load_at_s)).tolist(),
                [*repeat(None, len(self) - len(self._why)), *self._why],
                ["optimistic" if blind else "digest" for blind in unknown.tolist()],
            )
        )


class Scorer:
    """Reads the fleet, the ledgers of all routers and the optimistic entries. Keeps a board for
    each pool, and writes to it only what has changed."""

    def __init__(
        self,
        fleet: Fleet,
        ledger: Ledger,
        optimistic: OptimisticEntries,
        router_boot: str,
        peers: Peers,
        long_tokens: int,
    ) -> None:
        """`long_tokens`: so much to compute makes a prompt long."""
        self._fleet = fleet
        self._ledger = ledger
        self._peers = peers
        self._optimistic = optimistic
        self._router_boot = router_boot
        self._long_tokens = long_tokens
        self._pricer = pricer()
        self._boards: dict[str, Board] = {}
        self._board_of: dict[str, Board] = {}
        self._roster_version = fleet.roster_version
        self._changed: set[str] = set()
        fleet.on_change(self._changed.add)

    def survey(self, query: RouteQuery, output_tokens: float, now_s: float) -> Field:
        """Filter and price. `output_tokens` is the length to expect of the answer."""
        demand = Demand(
            query.prompt_tokens,
            min(output_tokens, query.max_tokens),
            query.block_tokens,
            query.ttft_deadline_ms,
        )
        board = self._board(query.pool)
        digest_blocks = board.depths(self._fleet.index, query.chain.data)
        depths = board.promised(self._optimistic, query.chain, digest_blocks)
        depths = self._marked(query, board, depths, now_s)
        adapter_ms = None if query.adapter is None else board.adapter_ms(query.adapter)
        asked, below = _asked(query, board, adapter_ms), self._below(query, board)
        look = Look(demand, digest_blocks, depths, below, adapter_ms)

        def price(asked: np.ndarray) -> Prices:
            there = digest_blocks
            return self._pricer.price(
                board.sheet, demand, asked, depths, there, now_s, below, adapter_ms
            )

        if query.pin is not None or not board.has_roles:
            return Field(board, query, now_s, look, price(asked))
        prices, barred = price_by_role(board, query, asked, self._long_tokens, price)
        return Field(board, query, now_s, look, prices, barred)

    def helpers(self, pool: str) -> list[Member]:
        """Those that compute prompts and answer all the same now."""
        board = self._board(pool)
        fit = board.table[:, _BARRED] == 0
        helping_rows = np.flatnonzero(helping(board, 0, fit) & fit)
        return [board.members[row] for row in helping_rows.tolist()]

    def _below(self, query: RouteQuery, board: Board) -> Below | None:
        """What lies below the devices; None where nobody shows any of it."""
        index, brought = self._fleet.below, query.hand_off
        if brought is None or not brought.blocks:
            return board.below(index, query.chain.data) if index.used else None
        below = board.below(index, query.chain.data)
        board.bring(below, brought.store, brought.blocks)
        return below

    def _marked(
        self, query: RouteQuery, board: Board, depths: np.ndarray, now_s: float
    ) -> np.ndarray:
        """The depths with what another router has just sent there counted in."""
        marks = self._peers.marks
        if not len(marks) or not len(depths):
            return depths
        replica, depth = marks.deepest(query.chain, int(depths.max()), now_s) or ("", 0)
        row = board.rows.get(replica)
        if row is None or depth <= depths[row]:
            return depths
        depths = depths.copy()
        depths[row] = depth
        return depths

    def _board(self, pool: str) -> Board:
        """The pool's board, current."""
        if self._roster_version != self._fleet.roster_version:
            self._boards.clear()
            self._board_of.clear()
            self._roster_version = self._fleet.roster_version
        board = self._boards.get(pool)
        if board is None:
            board = self._boards[pool] = Board(pool, self._fleet.members(pool))
            self._board_of.update(dict.fromkeys(board.replicas, board))
            self._changed.update(board.replicas)
        if self._changed or not self._peers.alone:
            self._write_changed()
        ledger = self._ledger
        for replica in ledger.changed:
            own = self._board_of.get(replica)
            if own is not None:
                own.book(replica, ledger.booked(replica))
        ledger.changed.clear()
        return board

    def _write_changed(self) -> None:
        """Whole rows; with other routers about their reservations count too."""
        changed = set(self._changed)
        self._changed.clear()
        if not self._peers.alone:
            changed |= self._ledger.changed
        for replica in changed:
            self._write(replica)
        self._ledger.changed.difference_update(changed)

    def _write(self, replica: str) -> None:
        board = self._board_of.get(replica)
        if board is None:
            return
        member = board.members[board.rows[replica]]
        if member.load is not None:
            self._ledger.note_seen(replica, member.load.seen.get(self._router_boot, 0))
            self._peers.note_seen(replica, member.load.seen)
        booked = together(self._ledger.booked(replica), self._peers.booked(replica))
        board.write(member, booked)


def _asked(query: RouteQuery, board: Board, adapter_ms: np.ndarray | None) -> np.ndarray:
    """Who may be asked at all, as far as the query says: where its adapter is served, if it needs
    one."""
    if query.pin is None and not query.exclude and adapter_ms is None:
        return board.sheet.everybody
    asked = board.sheet.everybody.copy()
    if adapter_ms is not None:
        asked[~np.isfinite(adapter_ms)] = 0
    if query.pin is not None:
        asked[:] = [member.replica == query.pin for member in board.members]
    for replica in query.exclude & board.rows.keys():
        asked[board.rows[replica]] = 0
    return asked
