"""The ledger: whatever happens in whatever order, sums are right, and zero when nothing is open."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.choice.reserve import SIZES, Booked, Ledger, Reservation, size_of

REPLICAS = ("a", "b")


def reservation(number: int, replica: str, now_s: float) -> Reservation:
    return Reservation(
        decision_id=f"d{number}",
        replica=replica,
        dispatch_seq=number,
        prefill_tokens=100 + number,
        prefill_ms=10.0 * number,
        context_tokens=200,
        blocks=7,
        prefill_until_s=now_s + 10,
        expires_s=now_s + 30,
    )


class LedgerAgainstTwin(RuleBasedStateMachine):
    """The twin keeps plain lists and sums them anew each time."""

    numbers = st.integers(1, 40)
    replicas = st.sampled_from(REPLICAS)

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.made: dict[int, Reservation] = {}
        self.open: dict[int, bool] = {}
        self.overdue: set[int] = set()
        self.seen = dict.fromkeys(REPLICAS, 0)
        self.now_s = 0.0

    @rule(replica=replicas)
    def reserve(self, replica: str) -> None:
        number = len(self.made) + 1
        self.made[number] = reservation(number, replica, self.now_s)
        self.open[number] = True
        self.ledger.reserve(reservation(number, replica, self.now_s))

    @rule(number=numbers)
    def first_token(self, number: int) -> None:
        self.ledger.first_token(f"d{number}")
        if number in self.open:
            self.open[number] = False

    @rule(number=numbers)
    def is_overdue(self, number: int) -> None:
        self.ledger.overdue(f"d{number}")
        if self.open.get(number):
            self.overdue.add(number)

    @rule(number=numbers)
    def release(self, number: int) -> None:
        released = self.ledger.release(f"d{number}")
        assert (released is not None) == (number in self.open)
        self.open.pop(number, None)

    @rule(replica=replicas, number=numbers)
    def report(self, replica: str, number: int) -> None:
        if any(made.replica == replica for made in self.made.values()):
            number = min(number, len(self.made))
            self.ledger.note_seen(replica, number)
            self.seen[replica] = max(self.seen[replica], number)

    @rule(replica=replicas)
    def end_life(self, replica: str) -> None:
        self.ledger.end_life(replica)
        self.seen[replica] = 0
        for number in [n for n in self.open if self.made[n].replica == replica]:
            del self.open[number]

    @rule(seconds=st.sampled_from([1.0, 11.0, 31.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.ledger.expire(self.now_s)
        for number in list(self.open):
            if self.made[number].expires_s <= self.now_s:
                del self.open[number]
            elif self.made[number].prefill_until_s <= self.now_s:
                self.open[number] = False

    @invariant()
    def sums_are_right(self) -> None:
        assert len(self.ledger) == len(self.open)
        for replica in REPLICAS:
            *sums, sizes = astuple(self.ledger.booked(replica))
            assert sums == pytest.approx(self.truth(replica))
            assert sizes == pytest.approx(self.sizes(replica))

    def sizes(self, replica: str) -> list[float]:
        early = [n for n in self.open if self.made[n].replica == replica and self.open[n]]
        sizes = [0.0] * SIZES
        for number in early:
            sizes[size_of(self.made[number].prefill_ms)] += self.made[number].prefill_ms
        return sizes

    def truth(self, replica: str) -> list[float]:
        mine = [n for n in self.open if self.made[n].replica == replica]
        unseen = [n for n in mine if n > self.seen_when_made(replica, n)]
        early = [n for n in unseen if self.open[n]]
        return [
            len(mine),
            sum(self.open[n] and n not in self.overdue for n in mine),
            len(unseen),
            len([n for n in early if n not in self.overdue]),
            sum(self.made[n].prefill_tokens for n in early),
            sum(self.made[n].prefill_ms for n in early),
            200 * len(unseen),
            7 * len(unseen),
        ]

    def seen_when_made(self, replica: str, number: int) -> int:
        return self.seen[replica]

    def teardown(self) -> None:
        for number in self.made:
            self.ledger.release(f"d{number}")
        assert len(self.ledger) == 0
        for replica in REPLICAS:
            assert self.ledger.booked(replica) == Booked()


TestLedgerAgainstTwin = LedgerAgainstTwin.TestCase
TestLedgerAgainstTwin.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_beyond_the_limit_the_oldest_is_written_off() -> None:
    ledger = Ledger(limit=2)
    for number in (1, 2, 3):
        ledger.reserve(reservation(number, "a", 0.0))
    assert len(ledger) == 2
    assert ledger.expired_total == 1
    assert ledger.release("d1") is None
