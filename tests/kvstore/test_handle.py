"""Batches in a thread of their own: bounded, cancelled without a buffer left in use (K1)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Event

import pytest

from kvstore.handle import Job, WorkThread
from kvstore.tier import STORED, Outcome


class Slow:
    """Works until it is told to go on, or stopped."""

    def __init__(self) -> None:
        self.began = Event()
        self.go = Event()
        self.left = False

    def __call__(self, job: Job) -> Sequence[Outcome]:
        self.began.set()
        while job.stopping is None and not self.go.wait(0.001):
            pass
        self.left = True
        return [job.stopping or STORED]


def job_of(work: Slow, seconds: float = 30.0, size_bytes: int = 1) -> Job:
    return Job(work, 1, time.monotonic() + seconds, size_bytes)


def test_K1_cancel_returns_when_the_worker_has_left_the_buffers() -> None:
    thread, work = WorkThread("t", 4, 100), Slow()
    job = thread.submit(job_of(work))
    assert work.began.wait(10)
    job.cancel()
    assert work.left
    assert job.result(0)[0].reason == "cancelled"
    thread.close()


def test_a_waiting_batch_is_cancelled_at_once() -> None:
    thread, first, second = WorkThread("t", 4, 100), Slow(), Slow()
    running, waiting = thread.submit(job_of(first)), thread.submit(job_of(second))
    waiting.cancel()
    assert waiting.result(0)[0].reason == "cancelled"
    assert not second.began.is_set()
    first.go.set()
    assert running.result(10) == [STORED]
    running.cancel()
    assert running.result(0) == [STORED]
    thread.close()
    assert not second.began.is_set()


def test_too_much_waiting_is_refused_in_jobs_and_in_bytes() -> None:
    thread, work = WorkThread("t", 2, 100), Slow()
    thread.submit(job_of(work))
    assert work.began.wait(10)
    assert thread.submit(job_of(Slow(), size_bytes=100)).result(0)[0].reason == "busy"
    waiting = [thread.submit(job_of(Slow())) for _ in range(3)]
    assert waiting[2].result(0)[0].reason == "busy"
    with pytest.raises(TimeoutError):
        waiting[0].result(0)
    work.go.set()
    for job in waiting:
        job.cancel()
    thread.close()
    assert thread.backlog_bytes == 0
    assert thread.submit(job_of(work)).result(0)[0].reason == "closed"


def test_the_deadline_ends_it_and_a_fault_costs_only_its_batch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    thread, work = WorkThread("t", 4, 100), Slow()
    assert thread.submit(job_of(work, seconds=0.02)).result(10)[0].reason == "deadline"
    assert thread.submit(job_of(work, seconds=-1)).result(10)[0].reason == "deadline"

    def broken(job: Job) -> Sequence[Outcome]:
        raise KeyError("x")

    assert thread.submit(Job(broken, 2, time.monotonic() + 5)).result(10)[1].reason == "fault"
    work.go.set()
    assert thread.submit(job_of(work)).result(10) == [STORED]
    thread.drain(10)
    thread.close()
