"""Mailboxes: bounded, merging, and never losing a token; slow links end in held requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from events.output import CoreDelta, CoreFinish, StepFrame, TokenLogprob, Usage
from events.request import Hold, Resume
from events.wire import encode
from replica.front.mailbox import Mailbox, payload_bytes
from tests.replica.front.rig import request, rig
from tests.waiting import until

HIGH, HARD = 400, 800
STEP = 1024


def delta(child: int, number: int, text: str = "x", finish: CoreFinish | None = None) -> CoreDelta:
    usage = Usage(9, 3, number)
    logprobs = (TokenLogprob(number, -1.0, ((number, -1.0), (0, -2.0))),)
    return CoreDelta("r", 1, child, text, (number,), logprobs, usage, finish)


class MailboxMachine(RuleBasedStateMachine):
    """Against three plain lists: whatever is merged, each child's tokens come in order."""

    def __init__(self) -> None:
        super().__init__()
        self.box = Mailbox(HIGH, HARD)
        self.expected: dict[int, deque[tuple[int, str]]] = {0: deque(), 1: deque(), 2: deque()}
        self.number = 0
        self.finished: set[int] = set()

    @rule(child=st.integers(0, 2), text=st.text(max_size=30), last=st.booleans())
    def put(self, child: int, text: str, last: bool) -> None:
        if child in self.finished or self.box.bytes > 2 * HARD:
            return
        self.number += 1
        finish = CoreFinish(reason="stop") if last and self.number > 8 else None
        if finish:
            self.finished.add(child)
        self.box.put(delta(child, self.number, text, finish))
        self.expected[child].append((self.number, text))

    @rule(room=st.integers(0, 900))
    def take(self, room: int) -> None:
        before = len(self.box)
        taken = self.box.take(room)
        assert bool(taken) == bool(before)
        for one in taken:
            tokens = [self.expected[one.child].popleft() for _ in one.token_ids]
            assert list(one.token_ids) == [number for number, _ in tokens]
            assert one.text == "".join(text for _, text in tokens)
            assert [logprob.token_id for logprob in one.logprobs] == list(one.token_ids)
            assert one.usage.completion_tokens == one.token_ids[-1]
            if one.finish:
                assert not self.expected[one.child]

    @invariant()
    def sizes_add_up(self) -> None:
        assert (self.box.bytes == 0) == (len(self.box) == 0)
        assert self.box.full == (self.box.bytes > HARD)
        # Merged deltas are as few as children, beyond what fits below the high water.
        assert len(self.box) <= HIGH // 96 + 1 + 3

    def teardown(self) -> None:
        self.take(10**9)
        assert not any(self.expected.values())
        assert self.box.bytes == 0


TestMailbox = MailboxMachine.TestCase
TestMailbox.settings = settings(max_examples=50, stateful_step_count=40)


@given(st.text(max_size=50), st.lists(st.integers(0, 2**31), max_size=20))
def test_payload_bytes_are_an_upper_bound_of_text_and_ids(text: str, ids: list[int]) -> None:
    one = CoreDelta("r", 1, 0, text, tuple(ids), (), Usage(1, 0, 1))
    assert payload_bytes(one) >= len(text.encode()) + len(ids)


def stop_reading(router) -> None:
    router.socket._response.connection.transport.pause_reading()


def resume_reading(router) -> None:
    router.socket._response.connection.transport.resume_reading()


async def fill(front, child, holds: int = 1) -> int:
    """Step until the child is held; the number of characters that it made."""
    made = 0
    deadline = time.monotonic() + 20.0
    while front.front.counters.mailbox_holds < holds:
        assert time.monotonic() < deadline
        front.engine.step({child: b"y" * STEP})
        made += STEP
        await asyncio.sleep(0)
    return made


async def test_O5_a_link_that_is_not_read_holds_its_requests_and_loses_nothing() -> None:
    async with rig(mailbox_bytes=16_384) as front:
        router, other = await front.dial(), await front.dial()
        await router.send(request())
        await other.send(request())
        await front.submitted(2)
        slow, quick = (r.child for r in front.engine.requests)
        stop_reading(router)
        made = await fill(front, slow)
        assert ("hold", slow) in front.engine.calls
        front.engine.step({quick: b"swift"}, finish="stop")
        assert (await other.answer()).text == "swift", "a neighbour is not blocked"
        resume_reading(router)
        await until(lambda: ("resume", slow) in front.engine.calls)
        front.engine.step({slow: b"end"}, finish="length")
        answer = await router.answer()
        assert answer.text == "y" * made + "end"
        assert len(answer.token_ids) == made + 3
        steps = made // STEP + 1
        merged = steps - len(answer.deltas)
        assert merged > 0
        found = await numbers(front)
        assert found["deltas_total"] == steps + 1, "the neighbour's too"
        assert found["deltas_merged_total"] == merged
        assert found["mailbox_holds_total"] == 1


async def test_O5_a_reader_that_stays_slow_is_ended_and_memory_stays_bounded() -> None:
    async with rig(mailbox_bytes=16_384, slow_s=0.05, stall_s=20.0) as front:
        router = await front.dial()
        await router.send(request())
        await front.submitted()
        child = front.engine.requests[0].child
        stop_reading(router)
        await fill(front, child)
        await until(lambda: front.front.counters.mailbox_aborts == 1)
        assert ("abort", child) in front.engine.calls
        (attempt,) = front.front.attempts
        assert attempt.mailbox.bytes < 16_384 + 8 * STEP * 6
        resume_reading(router)
        finish = (await router.answer()).finish
        assert (finish.reason, finish.error.code) == ("error", "slow_reader")


async def test_O5_a_link_that_stalls_for_good_is_cut() -> None:
    async with rig(mailbox_bytes=16_384, stall_s=0.05) as front:
        router = await front.dial()
        await router.send(request())
        await front.submitted()
        child = front.engine.requests[0].child
        stop_reading(router)
        await fill(front, child)
        await until(front.empty)
        assert ("abort", child) in front.engine.calls
        resume_reading(router)
        await router.closed()


async def numbers(front) -> dict[str, float]:
    """What /metrics says of the output side."""
    _, text = await front.get("/metrics")
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("warmroute_replica_"): float(value) for name, value in lines}


async def test_O5_all_mailboxes_together_are_bounded_and_the_fullest_wait() -> None:
    """None of them is full by itself; the quick neighbour is never held."""
    async with rig(mailbox_bytes=1 << 20, mailboxes_bytes=64_000) as front:
        router, other = await front.dial(), await front.dial()
        for name in ("a", "b", "c", "d"):
            await router.send(request(name))
        await other.send(request("quick"))
        await front.submitted(5)
        *slow, quick = sorted(r.child for r in front.engine.requests)
        stop_reading(router)
        for child in slow:
            while ("hold", child) not in front.engine.calls:
                front.engine.step(dict.fromkeys(slow, b"y" * STEP))
                front.engine.step({quick: b"z"})
                await asyncio.sleep(0)
        assert front.front.attempts.waiting_bytes < 2 * 64_000
        assert ("hold", quick) not in front.engine.calls
        found = await numbers(front)
        assert found["held_attempts"] == 4
        assert found["output_waiting_bytes"] > 64_000
        assert found["output_oldest_seconds"] > 0
        resume_reading(router)
        await until(lambda: all(("resume", child) in front.engine.calls for child in slow))
        for child in (*slow, quick):
            front.engine.step({child: b""}, finish="stop")
        for name in ("a", "b", "c", "d"):
            await router.answer(name)
        await other.answer("quick")
        found = await numbers(front)
        assert (found["held_attempts"], found["output_waiting_bytes"]) == (0, 0)
        assert found["output_oldest_seconds"] == 0
        assert found["deltas_merged_total"] == 0, "none was above its own high water"
        assert found["socket_blocked_seconds_total"] > 0


async def test_a_router_hold_survives_the_mailbox_being_emptied() -> None:
    async with rig(mailbox_bytes=16_384) as front:
        router = await front.dial()
        await router.send(request())
        await front.submitted()
        child = front.engine.requests[0].child
        stop_reading(router)
        await fill(front, child)
        await router.send(Hold(request_id="r1", attempt=1))
        (attempt,) = front.front.attempts
        await until(lambda: len(attempt.holds) == 2)
        resume_reading(router)
        await until(lambda: len(attempt.holds) == 1)
        assert front.engine.calls == [("hold", child)]
        await router.send(Resume(request_id="r1", attempt=1))
        await until(lambda: front.engine.calls == [("hold", child), ("resume", child)])


def test_what_is_told_of_a_prompt_survives_merging() -> None:
    box = Mailbox(0, HARD)
    first = CoreDelta("r", 1, 0, "a", (1,), (), Usage(2, 0, 1), None, (TokenLogprob(7, -0.5),))
    box.put(first)
    assert box.put(delta(0, 2))
    (merged,) = box.take(STEP)
    assert merged.prompt_logprobs == first.prompt_logprobs
    assert merged.token_ids == (1, 2)


def test_a_bound_that_is_met_is_not_passed() -> None:
    one = delta(0, 1)
    probe = Mailbox(10**6, 10**6)
    probe.put(one)
    exact = Mailbox(probe.bytes, probe.bytes)
    exact.put(one)
    assert exact.low
    assert not exact.full
    tight = Mailbox(probe.bytes - 1, probe.bytes - 1)
    tight.put(one)
    assert not tight.low
    assert tight.full


def test_alternatives_take_room_as_they_do_on_the_wire() -> None:
    def sized(alternatives: int) -> tuple[int, int]:
        top = tuple((40_000 + place, -1.0 - place) for place in range(alternatives))
        logprobs = (TokenLogprob(1, -1.0, top),)
        found = CoreDelta("r", 1, 0, "x", (1,), logprobs, Usage(9, 3, 1))
        return payload_bytes(found), len(encode(StepFrame(deltas=(found,))))

    (few, few_wire), (many, many_wire) = sized(0), sized(20)
    assert many - few >= 0.9 * (many_wire - few_wire)
