"""The link over a real socket: introduction, requests, cancellation, losses and bad frames."""

from __future__ import annotations

import asyncio
import weakref
from array import array

import pytest

from events.errors import CoreError
from events.output import CacheCleared
from events.request import (
    Abort,
    ChildProgress,
    ClearCache,
    Hold,
    Resume,
)
from replica.front.intake import MAX_ATTEMPT_S
from replica.server import drain
from tests.collector import no_collector
from tests.fakes.engine import inside, refuse_from
from tests.fakes.vocabulary import END_ID
from tests.replica.front.rig import request, rig
from tests.waiting import PATIENCE_S, until


async def test_a_request_from_submit_to_finish() -> None:
    async with rig() as front:
        router = await front.dial()
        await router.send(request(logprobs=0))
        await front.submitted()
        child = front.engine.requests[0].child
        front.engine.step({child: b"he"}, cached_tokens=4, logprobs=True)
        front.engine.step({child: b"y!"}, finish="length", cached_tokens=4, logprobs=True)
        answer = await router.answer()
        assert (answer.text, answer.finish.reason) == ("hey!", "length")
        assert answer.token_ids == tuple(b"hey!")
        assert [lp.token_id for d in answer.deltas for lp in d.logprobs] == list(b"hey!")
        usage = answer.deltas[-1].usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (5, 4, 4)
        stamps = answer.finish.stamps
        assert 0 <= stamps.first_token_ms <= stamps.finished_ms


async def test_an_answer_inside_submit_is_not_lost() -> None:
    async with rig(inside(b"at once")) as front:
        router = await front.dial()
        await router.send(request(n=3))
        for index in range(3):
            answer = await router.answer(child=index)
            assert (answer.text, answer.finish.reason) == ("at once", "stop")


async def test_one_frame_per_step_carries_all_requests_of_the_link() -> None:
    async with rig() as front:
        first, second = await front.dial(), await front.dial()
        await first.send(request("a"))
        await first.send(request("b"))
        await second.send(request("a"))
        await front.submitted(3)
        front.engine.step({r.child: b"x" for r in front.engine.requests}, finish="length")
        assert (await first.answer("b")).text == (await second.answer("a")).text == "x"
        assert [len(frame.deltas) for frame in first.frames] == [2]
        assert [len(frame.deltas) for frame in second.frames] == [1]


async def test_P9_n_children_have_own_index_seed_and_finish() -> None:
    async with rig() as front:
        router = await front.dial()
        await router.send(request(n=3, stop=("!",)))
        await front.submitted(3)
        assert [r.seed for r in front.engine.requests] == [11, 12, 13]
        assert len({r.child for r in front.engine.requests}) == 3
        zero, one, two = (r.child for r in front.engine.requests)
        front.engine.step({zero: b"ab", one: b"c!d", two: b"e"})
        front.engine.step({zero: b"cd"}, finish="length")
        front.engine.step({two: b"f"}, finish="stop")
        answers = [await router.answer(child=index) for index in range(3)]
        assert [a.text for a in answers] == ["abcd", "c", "ef"]
        assert [a.finish.reason for a in answers] == ["length", "stop", "stop"]
        assert [a.finish.stop_reason for a in answers] == [None, "!", None]
        assert [a.deltas[-1].usage.completion_tokens for a in answers] == [4, 2, 2]
        assert front.engine.calls == [("stop", one)]


async def test_P4_a_stop_string_ends_the_child_in_the_engine_too() -> None:
    async with rig(answers_aborts=False) as front:
        router = await front.dial()
        await router.send(request(stop=("own fox",)))
        await front.submitted()
        child = front.engine.requests[0].child
        front.engine.step({child: b"br"})
        front.engine.step({child: (256,)})
        front.engine.step({child: (257, 33)})
        answer = await router.answer()
        assert (answer.text, answer.finish.stop_reason) == ("br", "own fox")
        assert answer.finish.reason == "stop"
        assert front.engine.calls == [("stop", child)]
        front.engine.step({child: b"late"})
        front.engine.step({child: b""}, finish="abort")
        await until(lambda: front.front.counters.late_outputs == 2)


@pytest.mark.parametrize(("stop_ids", "reason"), [((), None), ((END_ID,), END_ID)])
async def test_the_end_token_is_counted_and_not_shown(stop_ids, reason) -> None:
    async with rig() as front:
        router = await front.dial()
        await router.send(request(stop_token_ids=stop_ids))
        await front.submitted()
        child = front.engine.requests[0].child
        front.engine.step({child: (*b"ok", END_ID)}, finish="stop", stop_token=END_ID)
        answer = await router.answer()
        assert (answer.text, answer.token_ids) == ("ok", tuple(b"ok"))
        assert answer.finish.stop_reason == reason
        assert answer.deltas[-1].usage.completion_tokens == 3


async def test_R16_a_request_goes_on_behind_what_was_delivered_elsewhere() -> None:
    progress = (
        ChildProgress(array("I", list(b"he said")).tobytes(), True),
        ChildProgress(array("I", list(b"he s")).tobytes()),
        ChildProgress(),
    )
    async with rig() as front:
        router = await front.dial()
        await router.send(request(n=3, progress=progress))
        await front.submitted(2)
        one, two = front.engine.requests
        assert (one.output, two.output) == (tuple(b"he s"), ())
        assert (one.seed, two.seed) == (12, 13)
        front.engine.step({one.child: b"aid", two.child: b"x"}, finish="length")
        answer = await router.answer(child=1)
        assert (answer.text, answer.token_ids) == ("aid", tuple(b"aid"))
        assert answer.deltas[-1].usage.completion_tokens == 7
        assert (await router.answer(child=2)).deltas[-1].usage.completion_tokens == 1
        assert ("r1", 1, 0) not in router.answers


async def test_an_error_of_the_engine_reaches_its_own_request_only() -> None:
    async with rig() as front:
        router = await front.dial()
        await router.send(request("a"))
        await router.send(request("b"))
        await front.submitted(2)
        bad, good = (r.child for r in front.engine.requests)
        error = CoreError(status=500, message="broken", type="server_error")
        front.engine.step({bad: b""}, finish="error", error=error)
        front.engine.step({good: b"fine"}, finish="length")
        assert (await router.answer("a")).finish.error == error
        assert (await router.answer("b")).text == "fine"


async def test_an_id_that_is_no_token_ends_only_its_child() -> None:
    async with rig() as front:
        router = await front.dial()
        await router.send(request("a"))
        await router.send(request("b"))
        await front.submitted(2)
        bad, good = (r.child for r in front.engine.requests)
        front.engine.step({bad: (*b"x", 299), good: b"y"})
        front.engine.step({good: b"z"}, finish="length")
        broken = await router.answer("a")
        assert (broken.text, broken.finish.error.status) == ("x", 500)
        assert (await router.answer("b")).text == "yz"


@pytest.mark.parametrize("nth", [0, 1, 2])
async def test_an_engine_that_raises_in_submit_leaks_nothing(nth: int) -> None:
    async with rig(refuse_from(nth)) as front:
        router = await front.dial()
        await router.send(request(n=3))
        for index in range(3):
            finish = (await router.answer(child=index)).finish
            assert (finish.reason, finish.error.status) == ("error", 500)
        await until(front.empty)
        submitted = [r.child for r in front.engine.requests]
        assert {child for _, child in front.engine.calls} >= set(submitted)


async def test_abort_answers_at_once_even_if_the_engine_never_does() -> None:
    async with rig(answers_aborts=False) as front:
        router = await front.dial()
        await router.send(request(n=2, stop=("zzz",)))
        await front.submitted(2)
        first = front.engine.requests[0].child
        front.engine.step({first: b"az"})
        await router.send(Abort(request_id="r1", attempt=1))
        await router.send(Abort(request_id="r1", attempt=1))
        await router.send(Abort(request_id="nobody", attempt=1))
        answers = [await router.answer(child=index) for index in range(2)]
        assert [a.finish.reason for a in answers] == ["abort", "abort"]
        assert answers[0].text == "az", "what was held back is shown at the end"
        await until(front.empty)
        front.engine.step({first: b"late"}, finish="abort")
        await until(lambda: front.front.counters.late_outputs == 1)
        assert len(front.engine.calls) == 2


async def test_P16_ids_belong_to_their_router() -> None:
    async with rig() as front:
        router, other = await front.dial(), await front.dial()
        await router.send(request())
        await other.send(request())
        await front.submitted(2)
        assert len({r.child for r in front.engine.requests}) == 2


@pytest.mark.parametrize("stage", ["queued", "running", "held", "finished"])
async def test_O1_a_lost_link_aborts_at_every_stage(stage: str) -> None:
    async with rig(answers_aborts=False) as front:
        router, other = await front.dial(), await front.dial()
        await router.send(request(n=2))
        await other.send(request())
        await front.submitted(3)
        lost = [r.child for r in front.engine.requests[:2]]
        if stage != "queued":
            front.engine.step(dict.fromkeys(lost, b"x"))
            await router.receive()
        if stage == "held":
            await router.send(Hold(request_id="r1", attempt=1))
            await until(lambda: len(front.engine.calls) == 2)
        if stage == "finished":
            front.engine.step(dict.fromkeys(lost, b"y"), finish="stop")
        front.engine.calls.clear()
        router.socket._response.connection.transport.abort()
        if stage == "finished":
            await until(lambda: len(front.front.attempts) == 1)
            assert front.engine.calls == []
        else:
            await until(lambda: len(front.engine.calls) == 2)
            assert {child for _, child in front.engine.calls} == set(lost)
        assert len(front.front.attempts) == 1, "the other router's request lives on"


async def test_O1_what_a_lost_link_held_is_freed_without_the_collector() -> None:
    """Its attempts know it, and it knows those whose deltas it was about to send."""
    async with rig() as front:
        router = await front.dial()
        await router.send(request())
        await front.submitted()
        (attempt,) = front.front.attempts
        gone = weakref.ref(attempt.key.outlet)
        del attempt
        with no_collector():
            router.socket._response.connection.transport.abort()
            front.engine.step({front.engine.requests[0].child: b"said to nobody"})
            await until(front.empty)
            await until(lambda: gone() is None)


async def test_hold_and_resume_reach_every_child_once() -> None:
    async with rig() as front:
        router = await front.dial()
        await router.send(request(n=2))
        await front.submitted(2)
        one, two = (r.child for r in front.engine.requests)
        for frame in (Hold, Hold, Resume, Resume):
            await router.send(frame(request_id="r1", attempt=1))
        await router.send(Hold(request_id="nobody", attempt=1))
        await until(lambda: len(front.engine.calls) == 4)
        assert front.engine.calls == [
            ("hold", one),
            ("hold", two),
            ("resume", one),
            ("resume", two),
        ]


async def test_clear_cache_is_answered() -> None:
    async with rig() as front:
        router = await front.dial()
        await router.send(ClearCache(command_id="c1", limit_blocks=5))
        assert await router.receive() == CacheCleared(command_id="c1", blocks=7)
        assert front.engine.limit_blocks == 5
        await router.send(ClearCache(command_id="c2"))
        assert await router.receive() == CacheCleared(command_id="c2", blocks=7)
        assert front.engine.limit_blocks is None


@pytest.mark.parametrize(
    ("believed", "queued", "stays"),
    [
        (None, 90_000, True),
        (0, 400, True),
        (0, 600, False),
        (900, 2_000, True),
        (900, 3_000, False),
    ],
)
async def test_R1_a_queue_far_above_what_was_believed_sends_the_request_elsewhere(
    believed: int | None, queued: int, stays: bool
) -> None:
    """A token takes this engine 1 ms."""
    async with rig(inside(b"here")) as front:
        front.engine.queued_prefill_tokens = queued
        router = await front.dial()
        await router.send(request(believed_queue_tokens=believed))
        answer = await router.answer()
        if stays:
            assert answer.text == "here"
        else:
            error = answer.finish.error
            assert (error.status, error.code, error.reroute) == (429, "queue_longer", True)
            assert front.engine.requests == []


async def test_draining_refuses_new_requests_and_lets_streams_finish() -> None:
    async with rig() as front:
        router = await front.dial()
        await router.send(request("old"))
        await front.submitted()
        front.front.intake.draining = True
        assert (await front.get("/ready"))[0] == 503
        assert (await front.get("/health"))[0] == 200
        await router.send(request("new"))
        error = (await router.answer("new")).finish.error
        assert (error.status, error.code, error.reroute) == (503, "draining", True)
        front.engine.step({front.engine.requests[0].child: b"bye"}, finish="length")
        assert (await router.answer("old")).text == "bye"


async def test_R20_what_does_not_finish_in_time_is_sent_away() -> None:
    async with rig() as front:
        router = await front.dial()
        await router.send(request(n=2))
        await front.submitted(2)
        front.engine.step({front.engine.requests[0].child: b"so far"})
        await router.receive()
        front.front.attempts.send_away()
        for child in (0, 1):
            error = (await router.answer(child=child)).finish.error
            assert (error.status, error.code, error.reroute) == (503, "draining", True)
        assert router.answers["r1", 1, 0].text == "so far"
        await asyncio.wait_for(front.front.attempts.drained(), PATIENCE_S)
        assert not front.engine.open


async def test_a_deadline_ends_what_the_engine_never_answers(monkeypatch) -> None:
    monkeypatch.setattr("replica.front.intake.DEADLINE_GRACE_S", 0.0)
    async with rig(answers_aborts=False) as front:
        router = await front.dial()
        await router.send(request(e2e_deadline_ms=20.0))
        finish = (await router.answer()).finish
        assert (finish.reason, finish.error.status) == ("error", 504)
        assert front.engine.calls == [("abort", front.engine.requests[0].child)]


async def test_a_deadline_is_never_longer_than_a_thread_can_sleep() -> None:
    async with rig() as front:
        router = await front.dial()
        await router.send(request(e2e_deadline_ms=1e308))
        await front.submitted()
        asked = front.engine.requests[0]
        assert asked.deadline_s <= asked.arrival_s + MAX_ATTEMPT_S


class QuietPublisher:
    """Notes what is told to the bus."""

    def __init__(self) -> None:
        self.draining = False

    def set_draining(self, draining: bool) -> None:
        self.draining = draining


class Order:
    """A StopRequest that nobody repeats."""

    def __init__(self) -> None:
        self.hurried = asyncio.Event()


async def test_R20_a_drain_is_told_first_waits_and_then_sends_away() -> None:
    async with rig() as front:
        router = await front.dial()
        for name in ("quick", "slow"):
            await router.send(request(name))
        await front.submitted(2)
        publisher, order = QuietPublisher(), Order()
        draining = asyncio.create_task(drain(front.app, publisher, order, 60.0))
        await until(lambda: publisher.draining)
        assert (await front.get("/ready"))[0] == 503
        front.engine.step({front.engine.requests[0].child: b"done"}, finish="stop")
        assert (await router.answer("quick")).text == "done"
        assert not draining.done()
        order.hurried.set()
        assert (await router.answer("slow")).finish.error.code == "draining"
        await asyncio.wait_for(draining, PATIENCE_S)
