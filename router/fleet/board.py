"""The replicas of one pool as a table of numbers: what the cost reads, kept current row by row.

A row is written again only after something about its replica changed, so a choice among hundreds
of replicas touches few of them in Python; what reservations change of it is written by itself.
"""

from __future__ import annotations

import math
import struct

import numpy as np

from events.load import DECODE, OWN_ENGINE, PREFILL
from router.choice.reserve import SIZES, Booked
from router.choice.sheet import ROW, Below, Sheet
from router.fleet.member import Member
from router.fleet.stores import Stores
from router.locality.below import BelowIndex, Reach
from router.locality.index import DigestIndex, Seats
from router.locality.optimistic import OptimisticEntries, PromiseSeats

FIRST_COME = (0.0,) * SIZES
"""Nothing is known to be overtaken: other engines than ours serve in the order of arrival."""

_BOOKED_AT = ROW.index("requests")
_booked_cells = struct.Struct(f"{len(ROW) - _BOOKED_AT}d")
_NUMBER_BYTES = 8

OUT_OF_REACH_MS = 1e9
"""Of another host's store, until its speed is told."""


class Board:
    """Rows in the order of `members`, which stays as it is for the board's life."""

    def __init__(self, pool: str, members: list[Member]) -> None:
        self.pool = pool
        self.members = members
        self.replicas = [member.replica for member in members]
        self.rows = {member.replica: row for row, member in enumerate(members)}
        self.sheet = Sheet(len(members))
        self.table = self.sheet.table
        self._cells = memoryview(self.table)
        self.stores = Stores(members)
        self.speeds = np.zeros((len(members), len(self.stores.numbers), 2))
        self.speeds[:, self.stores.of_peers] = OUT_OF_REACH_MS
        self.prefill_only = np.array([member.hello.role == PREFILL for member in members], bool)
        self.decode_only = np.array([member.hello.role == DECODE for member in members], bool)
        self.target_ms = np.array([_target_ms(member) for member in members])
        self.told_share = np.ones(len(members))
        self.has_roles = bool(self.prefill_only.any() or self.decode_only.any())
        self._reach: Reach | None = None
        self._seats: Seats | None = None
        self._promises: PromiseSeats | None = None
        self._adapters: dict[tuple[str, str], np.ndarray] = {}

    def write(self, member: Member, booked: Booked) -> None:
        """Bring the member's row up to date."""
        row = self.rows[member.replica]
        self.table[row] = row_of(member, booked)
        self.told_share[row] = member.usage.told_share
        self._adapters.clear()
        if member.load is not None and member.load.fetch:
            for number, place, fit in self.stores.fits(member):
                # What comes one time in two takes twice as long.
                trust = member.trust.fetches.value(number, member.load_at_s)
                self.speeds[row, place] = fit.latency / trust, fit.per_block / trust

    def book(self, replica: str, booked: Booked) -> None:
        """Bring up to date what reservations there change."""
        row = self.rows[replica]
        place = _NUMBER_BYTES * (len(ROW) * row + _BOOKED_AT)
        _booked_cells.pack_into(self._cells, place, *standing(self.members[row], booked))

    def seats(self, index: DigestIndex) -> Seats:
        """Where each member's leading blocks are looked up."""
        if self._seats is None or self._seats.version != index.version:
            for stranger in index.replicas(self.pool) - self.rows.keys():
                index.remove(stranger)
            self._seats = index.seats(self.pool, self.rows)
        return self._seats

    def below(self, index: BelowIndex, keys: bytes) -> Below:
        """The same for each tier below the members' devices, with their speeds."""
        if self._reach is None:
            self._reach = Reach(index, self.pool, self.rows, self.stores.shown)
        return Below(self.stores.reached(self._reach.depths(keys)), self.speeds)

    def bring(self, below: Below, store: str, blocks: int) -> None:
        """So many leading blocks were just written to a store: no digest shows them yet."""
        for depths, names in zip(below.depths, self.stores.names, strict=True):
            there = [name == store for name in names]
            depths[there] = np.maximum(depths[there], blocks)

    def adapter_ms(self, adapter: tuple[str, str]) -> np.ndarray:
        """How long each member would take to have an adapter in memory: float64 (members,), inf
        where it is not served, or can't be loaded for now."""
        found = self._adapters.get(adapter)
        if found is None:
            took = [_adapter_ms(member, adapter) for member in self.members]
            self._adapters[adapter] = found = np.array(took)
        return found

    def promises(self, optimistic: OptimisticEntries) -> PromiseSeats:
        """Where what is on its way to each member is looked up."""
        if self._promises is None or self._promises.version != optimistic.version:
            self._promises = optimistic.seats(self.rows)
        return self._promises


def _target_ms(member: Member) -> float:
    """Of a step in which others' prompts are computed; infinity where none is said."""
    return member.hello.itl_target_ms or math.inf


def adapter_fails(member: Member, adapter: tuple[str, str]) -> bool:
    """Whether it is served there, but can't be loaded for now."""
    return any(
        (note.name, note.digest) == adapter and note.failing for note in member.hello.adapters
    )


def _adapter_ms(member: Member, adapter: tuple[str, str]) -> float:
    for note in member.hello.adapters:
        if (note.name, note.digest) == adapter:
            if note.resident:
                return 0.0
            return math.inf if note.failing else note.load_ms
    return math.inf


def row_of(member: Member, booked: Booked) -> tuple[float, ...]:
    """All that is known of a replica, as a row of the table."""
    load, hello, breaker = member.load, member.hello, member.breaker
    barred = bool(member.misfits) or not member.linked or (load is not None and load.draining)
    digest = (member.digest_at_s, member.unknown_since_s is not None, member.trust.value)
    fits = (*_fits(member), max(1, hello.max_step_tokens))
    seen = (0, 0, 0)
    if load is not None:
        seen = (load.cached_blocks, load.prompt_tokens_total, load.cached_tokens_total)
    return (
        hello.context_tokens, member.total_blocks, barred, breaker.admits_from_s,
        member.load_at_s, *digest, *fits, hello.max_running, breaker.failures, load is None,
        backlog_ms(member), *seen, member.usage.share, *standing(member, booked),
    )  # fmt: skip


def standing(member: Member, booked: Booked) -> tuple[float, ...]:
    """Published load plus what no report has seen yet: the row from `requests` on."""
    load, hello = member.load, member.hello
    sizes = booked.prefill_ms_of_size if hello.engine == OWN_ENGINE else FIRST_COME
    if load is None:
        return (
            booked.requests, booked.requests - booked.prefilling, booked.unseen_context_tokens,
            booked.unseen_prefill_ms, booked.unseen_prefill_tokens,
            hello.total_blocks - booked.unseen_blocks, *sizes,
        )  # fmt: skip
    requests = load.waiting + load.running + booked.unseen_requests
    prefilling = load.waiting + booked.unseen_prefilling
    if prefilling < booked.prefilling:
        prefilling = booked.prefilling
    return (
        requests, requests - prefilling if requests > prefilling else 0,
        load.running_context_tokens + booked.unseen_context_tokens, booked.unseen_prefill_ms,
        load.queued_prefill_tokens + booked.unseen_prefill_tokens,
        load.free_blocks - booked.unseen_blocks, *sizes,
    )  # fmt: skip


def _fits(member: Member) -> tuple[float, ...]:
    """The time models; a refused replica has none, and none is asked for."""
    if member.misfits:
        return (0.0,) * 6
    prefill, decode = member.prefill, member.decode
    return prefill.a, prefill.b, prefill.c, decode.base, decode.per_row, decode.per_context


def backlog_ms(member: Member) -> float:
    """The prefill work that the last report told of."""
    load = member.load
    if load is None or member.misfits or load.queued_prefill_tokens <= 0:
        return 0.0
    prompts = max(1, load.waiting)
    return prompts * member.prefill.predict_ms(0, load.queued_prefill_tokens / prompts)
