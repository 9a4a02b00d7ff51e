"""What the front refuses: nonsense in a good frame, too much at once; the next one is served."""

from __future__ import annotations

import pytest

from events.output import StepFrame
from events.request import (
    Abort,
    ChildProgress,
)
from tests.fakes.engine import inside, never
from tests.replica.front.rig import request, rig


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": b"abc"},
        {"prompt": b""},
        {"prompt": b"\xff\xff\xff\xff"},
        {"model": "other"},
        {"public_cut_blocks": 2},
        {"public_cut_blocks": -1},
        {"attempt": -1},
        {"trace_id": "x" * 1000},
        {"e2e_deadline_ms": float("nan")},
        {"weight": 0.0},
        {"weight": float("nan")},
        {"warm_share": float("nan")},
        {"warm_share": -0.1},
        {"max_tokens": 0},
        {"max_tokens": 1000},
        {"n": 0},
        {"n": 100_000},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": -0.1},
        {"min_p": 2.0},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("-inf")},
        {"logit_bias": {999: 1.0}},
        {"logit_bias": {1: float("nan")}},
        {"logprobs": 21},
        {"min_tokens": 99},
        {"stop": ("",)},
        {"stop": ("a",) * 99},
        {"stop_token_ids": (999,)},
        {"progress": (ChildProgress(), ChildProgress())},
        {"progress": (ChildProgress(b"", True),)},
        {"progress": (ChildProgress(b"abc"),)},
        {"progress": (ChildProgress(b"\xff\xff\xff\xff"),)},
        {"progress": (ChildProgress(bytes(4 * 16)),)},
        {"progress": (ChildProgress(b"a\0\0\0b\0\0\0"),), "stop": ("ab",)},
        {"write_to": "host", "max_tokens": 2},
        {"write_to": "host", "max_tokens": 1, "n": 2},
        {"write_to": "host", "max_tokens": 1, "prompt_logprobs": 1},
        {"write_to": "x" * 1000, "max_tokens": 1},
    ],
)
async def test_what_can_not_be_served_is_refused_and_the_next_request_works(changes) -> None:
    async with rig(inside(b"ok")) as front:
        router = await front.dial()
        bad = request(**{"attempt": 1} | changes)
        await router.send(bad)
        answer = await router.answer(attempt=bad.attempt)
        assert answer.finish.reason == "error"
        assert answer.finish.error.status in (400, 404)
        assert not answer.finish.error.reroute
        assert not front.engine.requests
        await router.send(request("next"))
        assert (await router.answer("next")).text == "ok"


async def test_full_tables_refuse_with_a_way_out(monkeypatch) -> None:
    monkeypatch.setattr("replica.front.intake.MAX_LIVE_CHILDREN", 3)
    async with rig() as front:
        router = await front.dial()
        await router.send(request("a", n=2))
        await router.send(request("b", n=2))
        error = (await router.answer("b", child=1)).finish.error
        assert (error.status, error.code, error.reroute) == (429, "queue_full", True)
        assert error.retry_after_s >= 1.0
        await router.send(Abort(request_id="a", attempt=1))
        await router.answer("a", child=1)
        await router.send(request("c", n=3))
        await front.submitted(5)


async def test_refusals_to_a_router_that_does_not_read_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr("replica.front.session.MAX_ANSWERS", 4)
    async with rig(never) as front:
        router = await front.dial()
        for index in range(200):
            await router.send(request(f"r{index}", model="other"))
        assert (await router.answer("r199")).finish.error.status == 404
        assert all(isinstance(frame, StepFrame) for frame in router.frames)
