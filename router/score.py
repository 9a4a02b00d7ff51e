"""From a query to priced candidates: look up what each replica holds, filter and price it.

Changes nothing: the same code answers decide and explain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from events.decision import CandidateTerms
from router.board import Board
from router.cost import FIT, TERMS, TOO_LONG, UNHEARD, Demand, pricer
from router.fleet import Fleet
from router.member import Member
from router.optimistic import OptimisticEntries
from router.policies.base import Candidate, Candidates
from router.reserve import Ledger
from router.route import RouteQuery

Terms = NamedTuple("Terms", [(name, float) for name in TERMS])

_SCORE, _TTFT, _OVERLAP = map(TERMS.index, ("score", "ttft_ms", "overlap_blocks"))


@dataclass(frozen=True, slots=True)
class Scored:
    """What the reservation needs of a candidate; `new_blocks` is KV beyond what is cached."""

    member: Member
    ttft_ms: float
    new_blocks: int
    cached_tokens: int
    digest_blocks: int


class Field:
    """Everybody of the pool: those that may take the request, and why the others may not.

    True of the moment of its survey: use it before anything else changes."""

    def __init__(
        self,
        board: Board,
        query: RouteQuery,
        now_s: float,
        digest_blocks: np.ndarray,
        state: np.ndarray,
        terms: np.ndarray,
    ) -> None:
        self._board = board
        self._query = query
        self._now_s = now_s
        self._digest_blocks = digest_blocks
        self._state = state
        self._terms = terms
        self._fit = np.flatnonzero(state == FIT)
        replicas = board.replicas
        if len(terms) < len(replicas):
            replicas = [replicas[row] for row in self._fit.tolist()]
        self._candidates = Candidates(
            replicas,
            terms[:, _SCORE],
            terms[:, _OVERLAP],
            self._candidate,
        )

    def __len__(self) -> int:
        return len(self._terms)

    def candidates(self) -> Candidates:
        """What a policy sees."""
        return self._candidates

    def scored(self, replica: str) -> Scored:
        """One of the candidates."""
        row = self._board.rows[replica]
        terms = Terms(*self._terms[int(np.searchsorted(self._fit, row))].tolist())
        return Scored(
            member=self._board.members[row],
            ttft_ms=terms.ttft_ms,
            new_blocks=int(terms.new_blocks),
            cached_tokens=int(terms.cached_tokens),
            digest_blocks=int(self._digest_blocks[row]),
        )

    def soonest_ms(self) -> float:
        """The shortest TTFT to be had."""
        return float(self._terms[:, _TTFT].min())

    def least_queued_tokens(self) -> int:
        """The shortest queue, in prompt tokens to compute."""
        return min(int(self._board.row(row).queued_tokens) for row in self._fit.tolist())

    def filtered(self, count: int) -> tuple[CandidateTerms, ...]:
        """At most so many of those that may not: first the unfit by id, then the unheard."""
        rows = np.flatnonzero((self._state != FIT) & (self._state != UNHEARD)).tolist()
        rows += np.flatnonzero(self._state == UNHEARD).tolist()
        return tuple(self._without_terms(row) for row in rows[:count])

    def reasons(self) -> set[str]:
        """Why those may not."""
        return {self._why(row) for row in np.flatnonzero(self._state != FIT).tolist()}

    def _candidate(self, place: int) -> Candidate:
        row = int(self._fit[place])
        at, terms = self._board.row(row), Terms(*self._terms[place].tolist())
        return Candidate(
            replica=self._board.members[row].replica,
            overlap_blocks=int(terms.overlap_blocks),
            requests=int(at.requests),
            queued_prefill_tokens=int(at.queued_tokens),
            used_blocks=int(at.total_blocks - at.free_blocks - at.cached_blocks),
            total_blocks=int(at.total_blocks),
            terms=self._shown(self._board.members[row], terms),
        )

    def shown(self, places: list[int]) -> list[CandidateTerms]:
        """What is shown of the candidates at those places."""
        members, rows = self._board.members, self._fit[places].tolist()
        found = map(Terms._make, self._terms[places].tolist())
        return [self._shown(members[row], terms) for row, terms in zip(rows, found, strict=True)]

    def _shown(self, member: Member, terms: Terms) -> CandidateTerms:
        return CandidateTerms(
            replica=member.replica,
            score=terms.score,
            saved_prefill_ms=terms.saved_prefill_ms,
            queue_ms=terms.queue_ms,
            prefill_ms=terms.prefill_ms,
            transfer_ms=0.0,
            decode_share_ms=terms.decode_share_ms,
            harm_ms=terms.harm_ms,
            eviction_ms=terms.eviction_ms,
            overload_ms=terms.overload_ms,
            lateness_ms=terms.lateness_ms,
            overlap_blocks=int(terms.overlap_blocks),
            trust=member.trust.value,
            digest_age_ms=1e3 * (self._now_s - member.digest_at_s),
            load_age_ms=1e3 * (self._now_s - member.load_at_s),
        )

    def _without_terms(self, row: int) -> CandidateTerms:
        member = self._board.members[row]
        return CandidateTerms(
            replica=member.replica,
            score=0.0,
            saved_prefill_ms=0.0,
            queue_ms=0.0,
            prefill_ms=0.0,
            transfer_ms=0.0,
            decode_share_ms=0.0,
            harm_ms=0.0,
            eviction_ms=0.0,
            overload_ms=0.0,
            lateness_ms=0.0,
            overlap_blocks=0,
            trust=member.trust.value,
            digest_age_ms=1e3 * (self._now_s - member.digest_at_s),
            load_age_ms=1e3 * (self._now_s - member.load_at_s),
            filtered=self._why(row),
        )

    def _why(self, row: int) -> str:
        member, query = self._board.members[row], self._query
        if query.pin is not None and member.replica != query.pin:
            return "not_pinned"
        if member.replica in query.exclude:
            return "excluded"
        if self._state[row] == TOO_LONG:
            return "too_long"
        return member.unavailable(self._now_s) or "unheard"


class Scorer:
    """Reads the fleet, the ledger and the optimistic entries. Keeps a board for each pool, and
    writes to it only what has changed."""

    def __init__(
        self, fleet: Fleet, ledger: Ledger, optimistic: OptimisticEntries, router_boot: str
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._optimistic = optimistic
        self._router_boot = router_boot
        self._pricer = pricer()
        self._boards: dict[str, Board] = {}
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
        digest_blocks = board.depths(self._fleet.index, query.chain.halves())
        depths = board.promised(self._optimistic, query.chain, digest_blocks)
        state, terms = self._pricer.price(board.table, demand, _asked(query, board), depths, now_s)
        return Field(board, query, now_s, digest_blocks, state, terms)

    def _board(self, pool: str) -> Board:
        """The pool's board, current."""
        if self._roster_version != self._fleet.roster_version:
            self._boards.clear()
            self._roster_version = self._fleet.roster_version
        board = self._boards.get(pool)
        changed = self._changed | self._ledger.changed
        self._changed.clear()
        if board is None:
            board = self._boards[pool] = Board(pool, self._fleet.members(pool))
            changed |= board.rows.keys()
        for replica in changed:
            self._write(replica)
        self._ledger.changed.clear()
        return board

    def _write(self, replica: str) -> None:
        member = self._fleet.member(replica)
        board = self._boards.get(member.pool) if member is not None else None
        if member is None or board is None:
            return
        if member.load is not None:
            self._ledger.note_seen(replica, member.load.seen.get(self._router_boot, 0))
        board.write(member, self._ledger.booked(replica))


def _asked(query: RouteQuery, board: Board) -> np.ndarray:
    """Who may be asked at all, as far as the query says."""
    if query.pin is None and not query.exclude:
        return board.everybody
    asked = board.everybody.copy()
    if query.pin is not None:
        asked[:] = [member.replica == query.pin for member in board.members]
    for replica in query.exclude & board.rows.keys():
        asked[board.rows[replica]] = 0
    return asked
