"""The sink against a plain model: nothing lost, nothing after the end, holds alternate."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.output import CoreDelta, CoreFinish, Usage
from events.request import Abort, Hold, Resume
from router.dispatch.sink import AttemptSink, SinkLimits, weight_bytes
from router.errors import AttemptError, transport_failure

CHILDREN = 2
LIMITS = SinkLimits(buffer_bytes=2_000, slow_reader_s=1_000.0)


def delta(child: int, text: str, finish: bool = False) -> CoreDelta:
    end = CoreFinish(reason="stop") if finish else None
    return CoreDelta("r", 1, child, text, (1,), (), Usage(1, 0, 1), end)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 2), st.text("ab", max_size=300)),
        st.tuples(st.just("finish"), st.integers(0, 2), st.text("ab", max_size=3)),
        st.tuples(st.just("take"), st.just(0), st.just("")),
        st.tuples(st.just("fail"), st.just(0), st.just("")),
    ),
    max_size=30,
)


async def play(script: list[tuple[str, int, str]]) -> None:
    sent: list[Abort | Hold | Resume] = []
    sink = AttemptSink(("r", 1), range(CHILDREN), LIMITS, sent.append)
    wanted = dict.fromkeys(range(CHILDREN), "")
    got = dict.fromkeys(range(CHILDREN), "")
    finished: set[int] = set()
    failed = False
    for step, child, text in script:
        if step in ("put", "finish"):
            taken = sink.put(delta(child, text, step == "finish"), 0.0)
            assert taken == (child < CHILDREN and child not in finished and not failed)
            if taken:
                wanted[child] += text
                finished |= {child} if step == "finish" else set()
        elif step == "fail":
            sink.fail(transport_failure("test"))
            failed |= len(finished) < CHILDREN
        elif sink.buffered_bytes:
            batch = await sink.take()
            assert len({part.child for part in batch}) == len(batch)
            for part in batch:
                got[part.child] += part.text
        assert sink.buffered_bytes >= 0
        assert sink.ended == (failed or len(finished) == CHILDREN)
    await drain(sink, got, failed)
    assert got == wanted
    assert sink.answered == (len(finished) == CHILDREN and not failed)
    ended = sink.ended
    sink.release()
    sink.release()
    kinds = [type(frame) for frame in sent]
    assert kinds.count(Abort) == (0 if ended else 1)
    turns = [kind for kind in kinds if kind is not Abort]
    assert turns == [Hold, Resume] * (len(turns) // 2) + [Hold] * (len(turns) % 2)
    assert not sink.held
    assert sink.buffered_bytes == 0


async def drain(sink: AttemptSink, got: dict[int, str], failed: bool) -> None:
    while sink.buffered_bytes:
        for part in await sink.take():
            got[part.child] += part.text
    if failed:
        with pytest.raises(AttemptError) as told:
            await sink.take()
        assert told.value.kind == "transport"


@given(steps)
@settings(max_examples=150, deadline=None)
def test_sink_against_a_model(script: list[tuple[str, int, str]]) -> None:
    asyncio.run(play(script))


def test_a_delta_weighs_at_least_its_text() -> None:
    assert weight_bytes(delta(0, "x" * 1_000)) >= 1_000
