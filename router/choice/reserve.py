"""The ledger of reservations: what this router has sent to replicas that is not over yet.

A reservation is made at the choice, shrinks from prefill to decode at the first token, and is
released exactly once: by its outcome, by its expiry, or because its replica's life ended. Each
load report says which dispatches it has seen; only the others still count on top of it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field, fields
from math import frexp
from typing import Protocol

from msgspec import Struct

MAX_RESERVATIONS = 100_000
SIZES = 7
"""Prefills are told apart by size: below 4 ms, 16 ms, 64 ms, ... each four times the one before."""


class Reservation(Struct):
    """One request on its way or running. `blocks` is the KV that it will need there beyond what is
    cached; `expires_s` is monotonic; `prefill_until_s` is when a prefill is written off. `marks`
    let other routers follow it with a sibling. `overdue`: its prefill should be over, and nothing
    tells; until something does its cost stays, while its place among the prefills is free. `size`
    is the class of its prefill, which the ledger finds."""

    decision_id: str
    replica: str
    dispatch_seq: int
    prefill_tokens: int
    prefill_ms: float
    context_tokens: int
    blocks: int
    prefill_until_s: float
    expires_s: float
    marks: bytes = b""
    prefilling: bool = True
    unseen: bool = True
    overdue: bool = False
    size: int = 0


class Journal(Protocol):
    """Who wants to know what happens to reservations, as it happens."""

    def reserved(self, reservation: Reservation) -> None:
        """It was made."""

    def prefilled(self, reservation: Reservation) -> None:
        """Its prefill is over."""

    def released(self, reservation: Reservation) -> None:
        """It was given back, or written off."""


def size_of(prefill_ms: float) -> int:
    """In [0, SIZES)."""
    size = (frexp(prefill_ms)[1] - 1) // 2
    return 0 if size < 0 else size if size < SIZES else SIZES - 1


@dataclass(slots=True)
class Booked:
    """Sums over one replica's reservations. The `unseen_` ones are what no report includes yet.
    `prefill_ms_of_size`: what is being prefilled, seen or not."""

    requests: int = 0
    prefilling: int = 0
    unseen_requests: int = 0
    unseen_prefilling: int = 0
    unseen_prefill_tokens: int = 0
    unseen_prefill_ms: float = 0.0
    unseen_context_tokens: int = 0
    unseen_blocks: int = 0
    prefill_ms_of_size: list[float] = field(default_factory=lambda: [0.0] * SIZES)

    def __add__(self, other: Booked) -> Booked:
        """The sums of both."""
        sums = (getattr(self, name) + getattr(other, name) for name in _COUNTS)
        sizes = zip(self.prefill_ms_of_size, other.prefill_ms_of_size, strict=True)
        return Booked(*sums, prefill_ms_of_size=[mine + theirs for mine, theirs in sizes])


_COUNTS = [of.name for of in fields(Booked)][:-1]


@dataclass(slots=True)
class _Account:
    seen_seq: int = 0
    booked: Booked = field(default_factory=Booked)
    unseen: OrderedDict[int, Reservation] = field(default_factory=OrderedDict)


class Ledger:
    """All reservations of one router. `changed`: those whose sums have changed since the reader
    last emptied it, with these. `journal` may be set once, by whoever tells others."""

    def __init__(self, limit: int = MAX_RESERVATIONS) -> None:
        self.expired_total = 0
        self.changed: dict[str, Booked] = {}
        self.journal: Journal | None = None
        self._limit = limit
        self._open: OrderedDict[str, Reservation] = OrderedDict()
        self._prefilling: OrderedDict[str, Reservation] = OrderedDict()
        self._accounts: defaultdict[str, _Account] = defaultdict(_Account)

    def __len__(self) -> int:
        return len(self._open)

    def booked(self, replica: str) -> Booked:
        """What is booked there; read it, don't keep it."""
        account = self._accounts.get(replica)
        return account.booked if account is not None else Booked()

    def reserve(self, reservation: Reservation) -> None:
        """Book it. Beyond the limit the oldest reservation is written off."""
        if len(self._open) >= self._limit:
            self.expired_total += 1
            self.release(next(iter(self._open)))
        account = self._accounts[reservation.replica]
        self.changed[reservation.replica] = account.booked
        reservation.size = size_of(reservation.prefill_ms)
        reservation.unseen = reservation.dispatch_seq > account.seen_seq
        if reservation.unseen:
            account.unseen[reservation.dispatch_seq] = reservation
        self._open[reservation.decision_id] = reservation
        self._prefilling[reservation.decision_id] = reservation
        _count(account.booked, reservation, 1)
        if self.journal is not None:
            self.journal.reserved(reservation)

    def unseen(self) -> list[Reservation]:
        """What no report includes yet, each replica's oldest first."""
        return [one for account in self._accounts.values() for one in account.unseen.values()]

    def first_token(self, decision_id: str) -> None:
        """Its prefill is over; only its decode and its blocks stay booked. Idempotent."""
        reservation = self._prefilling.pop(decision_id, None)
        if reservation is not None:
            booked = self._accounts[reservation.replica].booked
            self.changed[reservation.replica] = booked
            _count(booked, reservation, -1, whole=False)
            reservation.prefilling = False
            if self.journal is not None:
                self.journal.prefilled(reservation)

    def overdue(self, decision_id: str) -> None:
        """Its prefill should be over by now, but nothing was heard that says so. Idempotent."""
        reservation = self._prefilling.get(decision_id)
        if reservation is None or reservation.overdue:
            return
        booked = self._accounts[reservation.replica].booked
        self.changed[reservation.replica] = booked
        _count(booked, reservation, -1, whole=False)
        reservation.overdue = True
        _count(booked, reservation, 1, whole=False)

    def release(self, decision_id: str) -> Reservation | None:
        """Give it back; the reservation the first time, None ever after."""
        reservation = self._open.pop(decision_id, None)
        if reservation is None:
            return None
        self._prefilling.pop(decision_id, None)
        account = self._accounts[reservation.replica]
        self.changed[reservation.replica] = booked = account.booked
        _count(booked, reservation, -1)
        account.unseen.pop(reservation.dispatch_seq, None)
        if not booked.requests:
            # Nothing is left: not of the rounding either.
            booked.unseen_prefill_ms = 0.0
            booked.prefill_ms_of_size = [0.0] * SIZES
        if self.journal is not None:
            self.journal.released(reservation)
        return reservation

    def note_seen(self, replica: str, seq: int) -> None:
        """A report includes this router's dispatches up to `seq`."""
        account = self._accounts.get(replica)
        if account is None or seq <= account.seen_seq:
            return
        account.seen_seq = seq
        self.changed[replica] = account.booked
        while account.unseen and next(iter(account.unseen)) <= seq:
            _, reservation = account.unseen.popitem(last=False)
            _count(account.booked, reservation, -1)
            reservation.unseen = False
            _count(account.booked, reservation, 1)

    def end_life(self, replica: str) -> None:
        """The replica's life is over: nothing is booked there any more."""
        account = self._accounts.pop(replica, None)
        if account is None:
            return
        self.changed[replica] = Booked()
        ended = [r.decision_id for r in self._open.values() if r.replica == replica]
        for decision_id in ended:
            del self._open[decision_id]
            self._prefilling.pop(decision_id, None)

    def expire(self, now_s: float) -> None:
        """Write off what should long have been over: first the prefill, then all of it."""
        while self._prefilling:
            oldest = next(iter(self._prefilling.values()))
            if oldest.prefill_until_s > now_s:
                break
            self.first_token(oldest.decision_id)
        while self._open:
            oldest = next(iter(self._open.values()))
            if oldest.expires_s > now_s:
                break
            self.expired_total += 1
            self.release(oldest.decision_id)


def _count(booked: Booked, reservation: Reservation, sign: int, whole: bool = True) -> None:
    """Add (or take away) one reservation to the sums, as it stands now, or only what its prefill
    adds to them."""
    unseen = reservation.unseen
    if whole:
        booked.requests += sign
        if unseen:
            booked.unseen_requests += sign
            booked.unseen_context_tokens += sign * reservation.context_tokens
            booked.unseen_blocks += sign * reservation.blocks
    if reservation.prefilling:
        place = 0 if reservation.overdue else sign
        booked.prefilling += place
        booked.prefill_ms_of_size[reservation.size] += sign * reservation.prefill_ms
        if unseen:
            booked.unseen_prefilling += place
            booked.unseen_prefill_tokens += sign * reservation.prefill_tokens
            booked.unseen_prefill_ms += sign * reservation.prefill_ms
