"""The numbering of frames: what a broken connection loses comes once, in order, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.errors import WireError
from events.session import ACK_FRAMES, Ack, Incoming, Outgoing

ACTIONS = st.lists(st.sampled_from(["add", "send", "take", "ack", "hear", "break"]), max_size=80)


@given(ACTIONS)
def test_R17_nothing_is_lost_or_doubled_however_often_it_breaks(actions: list[str]) -> None:
    sender, receiver = Outgoing(10_000), Incoming()
    wire: list[bytes] = []
    acks: list[Ack] = []
    made = 0
    taken: list[bytes] = []

    def take() -> None:
        taken.append(wire.pop(0))
        receiver.note()

    for action in actions:
        if action == "add":
            sender.add(b"%d" % made)
            made += 1
        elif action == "send" and (frame := sender.next()) is not None:
            wire.append(frame)
        elif action == "take" and wire:
            take()
        elif action == "ack":
            acks.append(receiver.ack())
        elif action == "hear" and acks:
            sender.acknowledge(acks.pop(0).received)
        elif action == "break":
            wire.clear()
            acks.clear()
            assert sender.rewind(receiver.received)
    while (frame := sender.next()) is not None:
        wire.append(frame)
    while wire:
        take()
    assert taken == [b"%d" % number for number in range(made)]


def test_over_the_bound_a_session_can_not_resume() -> None:
    sender = Outgoing(10)
    for _ in range(3):
        sender.add(b"12345")
        sender.next()
    assert not sender.rewind(0)
    assert sender.rewind(1)
    assert [sender.next(), sender.next(), sender.next()] == [b"12345", b"12345", None]


def test_what_was_acknowledged_is_not_kept() -> None:
    sender = Outgoing(10)
    for _ in range(50):
        sender.add(b"12345")
        sender.next()
        sender.acknowledge(sender._forgotten + len(sender._sent))
    assert sender.rewind(50)
    assert sender.next() is None


def test_S1_numbers_that_can_not_be_are_refused() -> None:
    sender = Outgoing(10)
    sender.add(b"x")
    sender.next()
    sender.acknowledge(1)
    for received in (-1, 0, 2):
        with pytest.raises(WireError):
            sender.acknowledge(received)
        assert not sender.rewind(received)


def test_acknowledgements_are_due_after_some_frames() -> None:
    receiver = Incoming()
    assert [receiver.note() for _ in range(ACK_FRAMES)] == [False] * (ACK_FRAMES - 1) + [True]
    assert receiver.ack() == Ack(received=ACK_FRAMES)
    assert not receiver.unsaid
