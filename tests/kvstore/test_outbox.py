"""What waits to be written: bounded, oldest dropped, nobody held up."""

from __future__ import annotations

from threading import Thread

from kvstore.outbox import Outbox


def test_the_oldest_is_dropped_and_counted() -> None:
    box: Outbox[int] = Outbox(3)
    box.put(range(5))
    assert (len(box), box.dropped) == (3, 2)
    assert box.take(2) == [2, 3]
    assert box.take(9) == [4]


def test_drained_is_when_the_last_one_was_dealt_with() -> None:
    box: Outbox[int] = Outbox(3)
    box.put([1])
    assert not box.drain(0.0)
    assert box.take(1) == [1]
    assert not box.drain(0.0)
    taker = Thread(target=box.take, args=(1,))
    taker.start()
    assert box.drain(5.0)
    box.close()
    taker.join(5.0)
    assert not taker.is_alive()


def test_nothing_comes_out_of_a_closed_one() -> None:
    box: Outbox[int] = Outbox(3)
    box.put([1])
    box.close()
    box.put([2])
    assert box.take(5) == []
    assert len(box) == 0
