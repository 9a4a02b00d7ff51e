"""What a router says twice is computed once; a later attempt fences the earlier one."""

from __future__ import annotations

import pytest

from events.output import CLEAN_FINISHES
from events.request import Abort
from tests.fakes.engine import inside
from tests.replica.front.rig import Rig, RouterEnd, request, rig
from tests.waiting import until


async def refusal(router: RouterEnd, attempt: int) -> tuple[int, str | None]:
    error = (await router.answer(attempt=attempt)).finish.error
    return error.status, error.code


def children(front: Rig) -> list:
    return [r.child for r in front.engine.requests]


async def test_R17_a_live_duplicate_is_refused_and_touches_nothing() -> None:
    async with rig() as front:
        router = await front.dial()
        again = await front.dial(router.boot)
        await router.send(request())
        await front.submitted()
        await again.send(request())
        assert await refusal(again, 1) == (409, "duplicate_request")
        assert len(front.engine.requests) == 1
        assert not front.engine.calls, "the live one is not touched"
        front.engine.step({children(front)[0]: b"ok"}, finish="stop")
        assert (await router.answer()).text == "ok"


async def test_R17_a_later_attempt_ends_the_earlier_one_also_over_another_link() -> None:
    async with rig() as front:
        router = await front.dial()
        again = await front.dial(router.boot)
        await router.send(request(n=2))
        await front.submitted(2)
        await again.send(request(attempt=2))
        await front.submitted(3)
        assert {child for _, child in front.engine.calls} == set(children(front)[:2])
        assert [(await router.answer(child=c)).finish.reason for c in (0, 1)] == ["abort"] * 2
        await again.send(request(attempt=1))
        assert await refusal(again, 1) == (409, "stale_attempt")
        front.engine.step({children(front)[2]: b"two"}, finish="length")
        assert (await again.answer(attempt=2)).text == "two"
        await again.send(request(attempt=1))
        await until(lambda: len(front.engine.requests) == 3)


async def test_R17_a_later_attempt_that_is_refused_still_fences() -> None:
    async with rig() as front:
        router = await front.dial()
        await router.send(request())
        await front.submitted()
        await router.send(request(attempt=2, model="other"))
        assert await refusal(router, 2) == (404, "model_not_found")
        assert (await router.answer()).finish.reason == "abort"


async def test_R17_what_was_answered_is_said_again_and_not_computed_again() -> None:
    async with rig(inside(b"once")) as front:
        router = await front.dial()
        for _ in range(3):
            await router.send(request(n=2))
            for child in (0, 1):
                answer = await router.answer(child=child)
                assert (answer.text, answer.token_ids) == ("once", tuple(b"once"))
                assert answer.finish.reason in CLEAN_FINISHES
            router.answers.clear()
        assert len(front.engine.requests) == 2


@pytest.mark.parametrize("why", ["aborted", "logprobs", "late"])
async def test_R17_what_can_not_be_said_again_is_computed_again(why: str) -> None:
    changes = {"logprobs": 0} if why == "logprobs" else {}
    async with rig() as front:
        router = await front.dial()
        await router.send(request(**changes))
        await front.submitted()
        if why == "aborted":
            await router.send(Abort(request_id="r1", attempt=1))
        else:
            front.engine.step({children(front)[0]: b"x"}, finish="stop", logprobs=bool(changes))
        await router.answer()
        if why == "late":
            front.front.attempts.fence._clock = lambda: float("inf")
        await router.send(request(**changes))
        await front.submitted(2)


async def test_O7_the_fence_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr("replica.front.fence.MAX_ANSWERS", 3)
    monkeypatch.setattr("replica.front.fence.MAX_DELTAS", 2)
    async with rig(inside(b"x")) as front:
        router = await front.dial()
        for number in range(9):
            await router.send(request(f"r{number}"))
            await router.answer(f"r{number}")
        fence = front.front.attempts.fence
        assert len(fence._answers) <= 3
        assert sum(answer.deltas for answer in fence._answers.values()) == fence._deltas <= 2
        assert not fence._said
        assert not fence._live
