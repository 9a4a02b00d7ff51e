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
    Demand,
    Prices,
)
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
_QUEUED = ROW.index("queued_tokens")
_CACHED, _OVERLAP = map(TERMS.index, ("cached_tokens", "overlap_blocks"))
_EVIDENCE = [ROW.index(name) for name in EVIDENCE]
_LINE_ROW = LINE.index("row")
_LINE_TERMS = slice(LINE.index(TERMS[0]), LINE.index(TERMS[-1]) + 1)
_LINE_EVIDENCE = slice(LINE.index(EVIDENCE[0]), LINE.index(EVIDENCE[-1]) + 1)
_LINE_BYTES = 8 * len(LINE)
_LOAD = ("requests", "queued_tokens", "total_blocks", "free_blocks", "cached_blocks")
_PRICE = (
    "ttft_ms", "new_blocks", "cached_tokens", "usable_tokens", "transfer_ms", "overlap_blocks",
)  # fmt: skip
_speed_of = itemgetter(*map(ROW.index, ("b", "c")))
_load_of = itemgetter(*map(ROW.index, _LOAD))
_price_of = itemgetter(*map(TERMS.index, _PRICE))


class Scored(Struct, frozen=True):
    """What the decision and its reservation need of a candidate; `new_blocks` is KV beyond what is
    cached. `fetched`: the part of `cached_tokens` that would come from the tiers below its
    device."""

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
    ) -> None:
        """Over the board's sheet. `adapter_ms`: how long its adapter takes, float64 (n,), inf where
        there is none. `barred`: by their role, bool (n,)."""
        self._board = board
        self._query = query
        self._now_s = now_s
        self._below = below
        self._adapter_ms = adapter_ms
        self._barred = barred
        self._made = {}
        self._state, self._rows = prices.state, prices.rows
        self.terms, self.lines, self.best = prices.terms, prices.lines, prices.best
        self.longest_blocks = int(prices.best.longest_blocks)
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
                self._fetched(row) if best.transfer_ms > 0 and self._below is not None else (),
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
            self._fetched(row) if transfer_ms > 0 and self._below is not None else (),
        )

    def _fetched(self, row: int) -> tuple[FetchRun, ...]:
        below, query = self._below, self._query
        assert below is not None
        b, c = _speed_of(self._board.table[row].tolist())
        depths, speeds = below.depths[:, row].tolist(), below.speeds[row].tolist()
        numbers, overlap = self._board.stores.numbers, int(self._board.sheet.depths[row])
        size, prompt_tokens = query.block_tokens, query.prompt_tokens
        return runs_of(b, c, overlap, depths, speeds, numbers, size, prompt_tokens)

    def most_cached_tokens(self) -> int:
        """Of the prompt, where most of it is warm; 0 where nobody may take it."""
        return int(self.terms[:, _CACHED].max(initial=0.0))

    def shown(self, first: str | None = None) -> Shown:
        """At most `SHOWN`: `first`, then the best of the other candidates, then of those that may
        not the unfit by id, at last the unheard."""
        board = self._board
        lead, why, lines = 0, [], self.lines
        if first is not None and board.rows[first] != self.best.row:
            found = (lines[:, _LINE_ROW] == board.rows[first]).nonzero()[0].tolist()
            lead = found[0] if found else len(lines) - 1
            if not found:
                lines = np.concatenate((lines[:-1], self._line(board.rows[first])))
        if len(lines) < SHOWN and not self._all:
            unfit = self._filtered()[: SHOWN - len(lines)]
            why = [self._why(row) for row in unfit.tolist()]
            lines = np.concatenate((lines, self._bare(unfit)))
        return Shown(board.replicas, lines.tobytes(), lead, why, self._now_s)

    def _line(self, row: int) -> np.ndarray:
        """A candidate's, as the pricing tells of the best: float64 (1, len(LINE))."""
        line, place = self._bare(np.array([row])), self._place(row)
        line[0, _LINE_TERMS] = self.terms[place]
        return line

    def _bare(self, rows: np.ndarray) -> np.ndarray:
        """Lines without terms."""
        lines = np.zeros((len(rows), len(LINE)))
        lines[:, _LINE_ROW] = rows
        lines[:, _LINE_EVIDENCE] = self._board.table[rows][:, _EVIDENCE]
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


class Shown(Sequence[CandidateTerms]):
    """What is kept of a field to be shown. The structs are made when the first of them is read,
    which for most choices is after the request is on its way."""

    __slots__ = ("_lead", "_lines", "_made", "_names", "_now_s", "_why")

    def __init__(
        self, names: list[str], lines: bytes, lead: int, why: list[str], now_s: float
    ) -> None:
        """`names` by row, and `LINE`s, of which the `lead`-th comes first; why the last ones are no
        candidates."""
        self._names = names
        self._lines = lines
        self._lead = lead
        self._why = why
        self._now_s = now_s
        self._made: list[CandidateTerms] | None = None

    def __len__(self) -> int:
        return len(self._lines) // _LINE_BYTES

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
        lines = np.frombuffer(self._lines).reshape(-1, len(LINE))
        if self._lead:
            order = [self._lead, *(at for at in range(len(lines)) if at != self._lead)]
            lines = lines[order]
        columns = lines.T
        terms = columns[_LINE_TERMS].tolist()
        trust, digest_at_s, load_at_s, unknown, _ = columns[_LINE_EVIDENCE]
        score, saved, queue, prefill, transfer, *others, _, overlap, _, _, _ = terms
        return list(
            map(
                CandidateTerms,
                [self._names[int(row)] for row in columns[_LINE_ROW].tolist()],
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
        board, chain = self._board(query.pool), query.chain
        sheet, pricer, seats = board.sheet, self._pricer, board.seats(self._fleet.index)
        promises = board.promises(self._optimistic)
        adapter_ms = None if query.adapter is None else board.adapter_ms(query.adapter)
        asked = below = None
        if query.exclude or query.pin is not None or adapter_ms is not None:
            asked = _asked(query, board, adapter_ms)
        if self._fleet.below.used or query.hand_off is not None:
            below = self._below(query, board)
        roles = board.has_roles and query.pin is None
        if not roles and self._peers.marks.empty:
            prices = pricer.survey(
                sheet, seats, chain, promises, demand, now_s, asked, below, adapter_ms
            )
            return Field(board, query, now_s, prices, below, adapter_ms, None)
        pricer.look(sheet, seats, chain, promises)
        self._mark(query, board, now_s)

        def price(asked: np.ndarray | None) -> Prices:
            return pricer.price(sheet, demand, now_s, asked, below, adapter_ms)

        if not roles:
            return Field(board, query, now_s, price(asked), below, adapter_ms, None)
        anybody = sheet.everybody if asked is None else asked
        prices, barred = price_by_role(board, query, anybody, self._long_tokens, price)
        return Field(board, query, now_s, prices, below, adapter_ms, barred)

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

    def _mark(self, query: RouteQuery, board: Board, now_s: float) -> None:
        """Count in what another router has just sent somewhere."""
        marks, depths = self._peers.marks, board.sheet.depths
        if marks.empty or not len(depths):
            return
        replica, depth = marks.deepest(query.chain, int(depths.max()), now_s) or ("", 0)
        row = board.rows.get(replica)
        if row is not None and depth > depths[row]:
            depths[row] = depth

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
        if self._changed or self._peers.changed or not self._peers.alone:
            self._write_changed()
        changed = self._ledger.changed
        for replica, booked in changed.items():
            own = self._board_of.get(replica)
            if own is not None:
                own.book(replica, booked)
        changed.clear()
        return board

    def _write_changed(self) -> None:
        """Whole rows; with other routers about their reservations count too."""
        changed = set(self._changed)
        self._changed.clear()
        changed |= self._peers.changed
        self._peers.changed.clear()
        if not self._peers.alone:
            changed |= self._ledger.changed.keys()
        for replica in changed:
            self._write(replica)
            self._ledger.changed.pop(replica, None)
        self._peers.changed -= changed

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
    asked = board.sheet.everybody.copy()
    if adapter_ms is not None:
        asked[~np.isfinite(adapter_ms)] = 0
    if query.pin is not None:
        asked[:] = [member.replica == query.pin for member in board.members]
    for replica in query.exclude & board.rows.keys():
        asked[board.rows[replica]] = 0
    return asked
