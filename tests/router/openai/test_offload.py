"""Threads for long work: bounded, with a deadline, nothing left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from events.errors import UserError
from router.rendering.offload import Offload


class Gate:
    """Work that runs until it is let go, or told to stop."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.go = threading.Event()
        self.was_stopped = False

    def __call__(self, stopped: threading.Event) -> str:
        self.running.set()
        assert self.go.wait(10)
        self.was_stopped = stopped.is_set()
        return "done"


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.go.set()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


async def reached(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 10)


async def drained(offload: Offload, pool: ThreadPoolExecutor) -> None:
    """The pool's only thread is through with everything that it was given."""
    await asyncio.wrap_future(pool.submit(int))
    assert offload.held.depth == 0


async def test_the_result_comes_back_and_the_size_is_returned(pool: ThreadPoolExecutor) -> None:
    offload = Offload(pool, 100, 10)
    assert await offload.run(60, lambda _: threading.current_thread().name) != "MainThread"
    await drained(offload, pool)


async def test_an_error_comes_back(pool: ThreadPoolExecutor) -> None:
    offload = Offload(pool, 100, 10)

    def fail(_: threading.Event) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await offload.run(1, fail)
    await drained(offload, pool)


async def test_O4_too_much_waiting_is_429(pool: ThreadPoolExecutor, gate: Gate) -> None:
    offload = Offload(pool, 100, 10)
    first = asyncio.create_task(offload.run(60, gate))
    await reached(gate.running)
    with pytest.raises(UserError) as caught:
        await offload.run(41, lambda _: None)
    assert (caught.value.error.status, caught.value.error.retry_after_s) == (429, 1.0)
    gate.go.set()
    assert await first == "done"
    await drained(offload, pool)
    assert await offload.run(100, lambda _: 1) == 1


async def test_past_the_deadline_is_503_and_work_is_told(
    pool: ThreadPoolExecutor, gate: Gate
) -> None:
    offload = Offload(pool, 100, 0.02)
    with pytest.raises(UserError) as caught:
        await offload.run(60, gate)
    assert caught.value.error.status == 503
    assert offload.held.depth == 60  # the thread still holds the text
    gate.go.set()
    await drained(offload, pool)
    assert gate.was_stopped


async def test_O1_a_caller_that_leaves_takes_its_work_out_of_the_queue(
    pool: ThreadPoolExecutor, gate: Gate
) -> None:
    offload = Offload(pool, 100, 10)
    first = asyncio.create_task(offload.run(10, gate))
    await reached(gate.running)
    ran = []
    waiting = asyncio.create_task(offload.run(20, lambda _: ran.append(1)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert offload.held.depth == 10
    gate.go.set()
    assert await first == "done"
    await drained(offload, pool)
    assert ran == []
