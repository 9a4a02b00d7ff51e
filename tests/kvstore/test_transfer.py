"""A transfer ends once, by whoever asks first, and never while its buffers are touched (K1, K3)."""

from __future__ import annotations

import itertools
import threading
import weakref
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.transfer import End, Ending, Transfer
from tests.collector import no_collector

STEPS = ("enter", "leave", "done", "failed", "cancelled", "late", "asked")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def transfer(clock: Clock, told: list[Ending]) -> Transfer:
    return Transfer(110.0, told.append, clock)


class Play:
    """One transfer driven by named steps, beside the plainest model of what must be told."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.told: list[Ending] = []
        self.subject = transfer(self.clock, self.told)
        self.inside: list[ExitStack] = []
        self.decided: End | None = None
        self.interrupts = 0

    def step(self, name: str) -> None:
        if name == "late":
            self.clock.now = 110.0
        elif name == "enter":
            self.enter()
        elif name == "leave":
            if self.inside:
                self.inside.pop().close()
        elif name == "asked":
            self.expire()
            assert (self.subject.asked is not None) is (self.decided is not None)
        else:
            won = self.subject.end(End(name))
            assert won is (self.decided is None)
            self.decided = self.decided or End(name)
        self.check()

    def enter(self) -> None:
        self.expire()
        stack = ExitStack()
        allowed = stack.enter_context(self.subject.touch(self.interrupt))
        assert allowed is (self.decided is None)
        if allowed:
            self.inside.append(stack)

    def interrupt(self) -> None:
        self.interrupts += 1

    def expire(self) -> None:
        if self.clock.now >= 110.0:
            self.decided = self.decided or End.EXPIRED

    def check(self) -> None:
        over = self.decided is not None and not self.inside
        assert [ending.how for ending in self.told] == ([self.decided] if over else [])
        assert (self.subject.ending is not None) is over


@given(st.lists(st.sampled_from(STEPS), max_size=14))
def test_K3_one_event_in_every_order(steps: list[str]) -> None:
    play = Play()
    for step in steps:
        play.step(step)
    while play.inside:
        play.step("leave")
    play.step("cancelled")
    assert len(play.told) == 1
    assert play.subject.wait(0) == play.told[0]


@pytest.mark.parametrize("order", list(itertools.permutations(("cancelled", "late", "done"))))
def test_K3_abort_timeout_and_finish_in_all_six_orders(order: tuple[str, ...]) -> None:
    play = Play()
    play.step("enter")
    for step in order:
        play.step(step)
        play.step("asked")
    assert not play.told, "the mover still touches the buffers"
    play.step("leave")
    first = End.EXPIRED if order[0] == "late" else End(order[0])
    assert [ending.how for ending in play.told] == [first]


def test_K1_cancel_tells_nobody_until_the_mover_has_left() -> None:
    told = threading.Event()
    subject = Transfer(1e12, lambda _: told.set())
    woken = threading.Event()
    with subject.touch(woken.set) as allowed:
        assert allowed
        assert subject.end(End.CANCELLED)
        assert woken.is_set()
        assert subject.wait(0.01) is None
        assert not told.is_set()
    assert told.is_set()
    assert subject.wait() == Ending(End.CANCELLED)


def test_racing_threads_get_one_ending() -> None:
    for _ in range(50):
        told: list[Ending] = []
        subject = Transfer(1e12, told.append)
        barrier = threading.Barrier(4)

        def ask(
            how: End, subject: Transfer = subject, barrier: threading.Barrier = barrier
        ) -> None:
            barrier.wait()
            with subject.touch():
                subject.end(how)

        threads = [threading.Thread(target=ask, args=(how,)) for how in End]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(told) == 1


def test_K2_a_wait_expires_what_nobody_moves() -> None:
    subject = Transfer(0.0)
    assert subject.wait(5.0) == Ending(End.EXPIRED, "deadline")


def test_a_failing_owner_does_not_hurt_the_mover(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Ending) -> None:
        raise RuntimeError("owner")

    subject = Transfer(1e12, fail)
    assert subject.end(End.DONE)
    assert subject.ending == Ending(End.DONE)
    assert "owner of a transfer failed" in caplog.text


def test_an_owner_that_keeps_its_transfer_is_freed_with_it() -> None:
    """Without the collector, which comes by rarely: blocks' tokens would wait for it."""

    class Owner:
        def __init__(self) -> None:
            self.told: list[Ending] = []
            self.transfer = Transfer(110.0, lambda ending: self.told.append(ending), Clock())

    owner = Owner()
    gone = weakref.ref(owner)
    owner.transfer.end(End.DONE)
    assert len(owner.told) == 1
    with no_collector():
        del owner
        assert gone() is None
