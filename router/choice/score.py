"""From a query to priced candidates: look up what each replica holds, filter and price it.

Changes nothing: the same code answers decide and explain.
"""

from __future__ import annotations

import numpy as np

from configs.schema import RouterConfig
from router.choice.field import Field
from router.choice.gaps import Promise, Promises
from router.choice.pricer import pricer
from router.choice.reserve import Ledger
from router.choice.roles import helping, price_by_role
from router.choice.route import RouteQuery
from router.choice.sheet import ROW, Below, Demand, Prices
from router.cluster.peers import Peers, together
from router.fleet.board import Board
from router.fleet.fleet import Fleet
from router.fleet.member import Member
from router.locality.optimistic import OptimisticEntries

_BARRED = ROW.index("barred")


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
        config: RouterConfig,
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._peers = peers
        self._optimistic = optimistic
        self._router_boot = router_boot
        self._long_tokens = config.split_min_tokens
        self._seat_share = config.split_decode_share
        self._promises = Promises()
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
        promised_ms = self._promises.of(query.pool, now_s)
        if query.itl_deadline_ms is not None:
            promised_ms = min(promised_ms, query.itl_deadline_ms)
        promise = Promise(promised_ms, output_tokens)
        long_tokens, seat_share = self._long_tokens, self._seat_share
        prices, barred = price_by_role(
            board, query, anybody, long_tokens, seat_share, promise, price
        )
        return Field(board, query, now_s, prices, below, adapter_ms, barred, promise)

    def placed(self, query: RouteQuery, now_s: float) -> None:
        """Remember the objective for its gaps."""
        self._promises.note(query.pool, query.itl_deadline_ms, now_s)

    def helpers(self, pool: str, output_tokens: float, now_s: float) -> list[Member]:
        """Those that compute prompts and answer all the same now."""
        board, promised_ms = self._board(pool), self._promises.of(pool, now_s)
        promise = Promise(promised_ms, output_tokens)
        fit = board.table[:, _BARRED] == 0
        rows = np.flatnonzero(helping(board, 0, fit, promise) & fit)
        return [board.members[row] for row in rows.tolist()]

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
        asked &= [member.replica == query.pin for member in board.members]
    for replica in query.exclude & board.rows.keys():
        asked[board.rows[replica]] = 0
    return asked
