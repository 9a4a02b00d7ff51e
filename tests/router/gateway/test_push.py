"""A stream by chutes, a pushed one, a pulled one and a whole answer: same bytes, or at least same
content."""

from __future__ import annotations

import asyncio
import ctypes
import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.model.card import ModelCard
from events.output import CoreDelta, StepFrame, TokenLogprob, Usage
from events.wire import encode
from router.dispatch.chutes import CAST_DELTAS, SETTLE_TURNS
from router.dispatch.sink import Direct
from router.dispatch.table import TURN_DELTAS
from router.openai.chat import ChatCollector, ChatStream
from router.openai.logprobs import TokenTexts
from router.openai.schema import ChatRequest, Controls
from router.openai.stream import DONE
from router.serving.pump import Pump
from router.serving.sse import KEEP_ALIVE
from router.telemetry.metrics import Metrics
from tests.router.gateway.house import events
from tests.router.gateway.pipe import HEAD, MESSAGES, Rig, Writer, content, deltas_of, turn
from tests.waiting import PATIENCE_S


def whole(n: int, logprobs: int | None, texts: TokenTexts, deltas: Sequence[CoreDelta]) -> Any:
    """The same as one body."""
    collector = ChatCollector(
        HEAD, ChatRequest("tiny", MESSAGES, Controls(n=n, logprobs=logprobs)), texts
    )
    for delta in deltas:
        collector.feed(delta)
    return json.loads(collector.body())


async def compare(
    kernels: ctypes.CDLL,
    texts: TokenTexts,
    n: int,
    logprobs: int | None,
    parts: Sequence[tuple[int, str]],
    moods: Sequence[tuple[bool, bool]],
) -> None:
    deltas = deltas_of(n, parts, logprobs is not None)
    pulled, pushed, mixed = (Rig(n, logprobs, texts, takes) for takes in (False, True, True))
    passed, moody = (Rig(n, logprobs, texts, True, kernels) for _ in range(2))
    await pulled.play([(False, True, delta) for delta in deltas])
    await pushed.play([(True, True, delta) for delta in deltas])
    await passed.play([(True, True, delta) for delta in deltas])
    for rig in (mixed, moody):
        await rig.play([(*moods[i % len(moods)], delta) for i, delta in enumerate(deltas)])
    assert pulled.writer.got == pushed.writer.got == passed.writer.got
    only_texts = n == 1 and logprobs is None and any(text for _, text in parts[1:])
    assert (passed.writer.passed > 0) is only_texts
    assert pulled.writer.pushed == 0
    body = whole(n, logprobs, texts, deltas)
    for rig in (pushed, mixed, passed, moody):
        said = content(rig.writer.got)
        for choice in body["choices"]:
            mine = said[choice["index"]]
            assert mine["text"] == choice["message"]["content"]
            assert mine["end"] == choice["finish_reason"]
            assert mine["logprobs"] == (choice.get("logprobs") or {"content": []})["content"]
        usage = json.loads(events(rig.writer.got)[-2])["usage"]
        assert usage == body["usage"]
        assert rig.writer.clean
        assert rig.run.done
        assert rig.tokens == sum(len(delta.token_ids) for delta in deltas)
        (outcome,) = (outcome for _, outcome in rig.chooser.outcomes)
        assert outcome.completion_tokens == body["usage"]["completion_tokens"]
        assert rig.reply.progress.choices[0].token_ids == [65] * sum(c % n == 0 for c, _ in parts)


@pytest.fixture(scope="session")
def texts(tiny_card: ModelCard) -> TokenTexts:
    return TokenTexts(tiny_card.tokenizer)


@given(
    st.integers(1, 3),
    st.sampled_from([None, 0]),
    st.lists(st.tuples(st.integers(0, 2), st.text(max_size=5)), max_size=12),
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_passed_is_pushed_is_pulled_is_whole(
    kernels: ctypes.CDLL,
    texts: TokenTexts,
    n: int,
    logprobs: int | None,
    parts: list[tuple[int, str]],
    moods: list[tuple[bool, bool]],
) -> None:
    asyncio.run(compare(kernels, texts, n, logprobs, parts, moods))


async def test_all_but_the_first_and_the_last_go_straight_to_a_socket_that_takes_them(
    texts: TokenTexts,
) -> None:
    rig = Rig(1, None, texts, takes=True)
    deltas = deltas_of(1, [(0, letter) for letter in "abcdef"], logprobs=False)
    await rig.play([(True, i == 0, delta) for i, delta in enumerate(deltas)])
    assert (rig.writer.pulled, rig.writer.pushed) == (2, 5)
    assert b"warmroute_itl_seconds_count 6.0" in rig.metrics.text()


async def test_deltas_of_one_frame_pass_as_one_chunk_and_are_noted_as_one(
    texts: TokenTexts, kernels: ctypes.CDLL
) -> None:
    rig = Rig(1, None, texts, takes=True, kernels=kernels)
    task = asyncio.create_task(rig.respond())
    await turn()
    first, *middle, last = deltas_of(1, [(0, letter) for letter in 'ab"\n\x01'], logprobs=False)
    await rig.arrive(first)
    await turn()
    await rig.arrive(*middle)
    assert (rig.writer.passed, rig.writer.pushed, rig.writer.pulled) == (1, 0, 1)
    assert rig.tokens == 1, "it is told now and then"
    for _ in range(SETTLE_TURNS):
        rig.link.attempts.settle()
    assert rig.tokens == 1 + len(middle)
    assert b"warmroute_itl_seconds_count 4.0" in rig.metrics.text()
    await rig.arrive(last)
    await asyncio.wait_for(task, PATIENCE_S)
    assert content(rig.writer.got)[0]["text"] == 'ab"\n\x01'
    assert rig.reply.progress.choices[0].token_ids == [65] * 5


async def test_what_follows_the_end_in_its_own_frame_does_not_overtake_it(
    texts: TokenTexts, kernels: ctypes.CDLL
) -> None:
    rig = Rig(1, None, texts, takes=True, kernels=kernels)
    task = asyncio.create_task(rig.respond())
    await turn()
    first, late, end = deltas_of(1, [(0, "a"), (0, "late")], logprobs=False)
    await rig.arrive(first)
    await turn()
    table = rig.link.attempts
    assert await table.take(encode(StepFrame(deltas=(end, late)))) is None
    await asyncio.wait_for(task, PATIENCE_S)
    assert table.late_deltas == 1
    assert content(rig.writer.got)[0]["text"] == "a"


async def test_what_waits_is_not_overtaken_by_what_a_chute_lets_pass_that_was_opened_meanwhile(
    texts: TokenTexts, kernels: ctypes.CDLL
) -> None:
    """A frame is taken in turns: a reader may come back, and open a chute, before its own delta
    of that frame is put; the next frame may be there already."""
    rig = Rig(1, None, texts, takes=True, kernels=kernels)
    task = asyncio.create_task(rig.respond())
    await turn()
    first, second, third, end = deltas_of(1, [(0, letter) for letter in "abc"], logprobs=False)
    table = rig.link.attempts
    await rig.arrive(first)
    table._turn_deltas = TURN_DELTAS
    assert await table.take(encode(StepFrame(deltas=(second,)))) is None
    assert table.chutes is not None
    assert len(table.chutes) == 1
    await rig.arrive(third)
    await rig.arrive(end)
    await asyncio.wait_for(task, PATIENCE_S)
    assert content(rig.writer.got)[0]["text"] == "abc"
    assert rig.reply.progress.choices[0].text == "abc"


async def _flowing(texts: TokenTexts, kernels: ctypes.CDLL) -> tuple[Rig, asyncio.Task[None]]:
    """A stream whose chute is open."""
    rig = Rig(1, None, texts, takes=True, kernels=kernels)
    task = asyncio.create_task(rig.respond())
    await turn()
    await rig.arrive(*deltas_of(1, [(0, "-")], logprobs=False)[:1])
    await turn()
    assert rig.link.attempts.chutes is not None
    assert len(rig.link.attempts.chutes) == 1
    return rig, task


def _crowd(middle: str) -> list[CoreDelta]:
    """Deltas of others around those of one stream, and its end."""
    *mine, end = deltas_of(1, [(0, letter) for letter in middle], logprobs=False)
    other = msgspec.structs.replace(mine[0], request_id="gone")
    return [each for delta in mine for each in [other] * CAST_DELTAS + [delta]] + [end]


async def test_a_long_frame_lets_others_have_their_turn_between_its_parts(
    texts: TokenTexts, kernels: ctypes.CDLL
) -> None:
    rig, task = await _flowing(texts, kernels)
    seen: list[int] = []

    async def look() -> None:
        while not task.done():
            seen.append(rig.link.attempts.late_deltas)
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    await rig.link.attempts.take(encode(StepFrame(deltas=tuple(_crowd("abcdef")))))
    await asyncio.wait_for(task, PATIENCE_S)
    await looking
    assert content(rig.writer.got)[0]["text"] == "-abcdef"
    assert rig.link.attempts.late_deltas == 6 * CAST_DELTAS
    assert len(set(seen)) >= 6


async def test_a_reading_that_ends_within_a_long_frame_takes_it_in_whole(
    texts: TokenTexts, kernels: ctypes.CDLL
) -> None:
    rig, task = await _flowing(texts, kernels)
    frame = encode(StepFrame(deltas=tuple(_crowd("abcdef"))))
    reading = asyncio.create_task(rig.link.attempts.take(frame))
    await asyncio.sleep(0)
    assert reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await asyncio.wait_for(task, PATIENCE_S)
    assert content(rig.writer.got)[0]["text"] == "-abcdef"


async def test_what_only_the_decoder_can_read_in_a_long_frame_comes_once(
    texts: TokenTexts, kernels: ctypes.CDLL
) -> None:
    """The kernel gives up at the last part: the parts before it have passed already."""
    rig, task = await _flowing(texts, kernels)
    *most, last, end = _crowd("abc")
    odd = msgspec.structs.replace(last, usage=Usage(-7, 3, 2))
    await rig.link.attempts.take(encode(StepFrame(deltas=(*most, odd, end))))
    await asyncio.wait_for(task, PATIENCE_S)
    assert content(rig.writer.got)[0]["text"] == "-abc"
    assert rig.link.attempts.late_deltas == 3 * CAST_DELTAS


async def test_a_frame_that_only_the_decoder_can_read_is_not_overtaken(
    texts: TokenTexts, kernels: ctypes.CDLL
) -> None:
    rig = Rig(1, None, texts, takes=True, kernels=kernels)
    task = asyncio.create_task(rig.respond())
    await turn()
    first, second, third, end = deltas_of(1, [(0, letter) for letter in "abc"], logprobs=False)
    await rig.arrive(first)
    await turn()
    await rig.arrive(msgspec.structs.replace(second, usage=Usage(-7, 3, 2)))
    await rig.arrive(third)
    await rig.arrive(end)
    await asyncio.wait_for(task, PATIENCE_S)
    assert content(rig.writer.got)[0]["text"] == "abc"


async def test_a_socket_that_fails_ends_its_own_stream_and_no_other(
    texts: TokenTexts, kernels: ctypes.CDLL
) -> None:
    rig = Rig(1, None, texts, takes=True, kernels=kernels)
    task = asyncio.create_task(rig.respond())
    await turn()
    first, second, *_ = deltas_of(1, [(0, "a"), (0, "b")], logprobs=False)

    def broken(data: bytes) -> bool:
        raise RuntimeError("the handler is closed")

    rig.writer.send = broken  # type: ignore[method-assign]
    await rig.arrive(first)
    await turn()
    await rig.arrive(second)
    await asyncio.wait_for(task, PATIENCE_S)
    assert DONE not in rig.writer.got
    assert len(rig.link.frames) == 1, "the replica is told to stop"


async def test_a_full_socket_gets_the_rest_in_order_when_it_takes_more(texts: TokenTexts) -> None:
    rig = Rig(1, None, texts, takes=True)
    deltas = deltas_of(1, [(0, letter) for letter in "abcdefgh"], logprobs=False)
    full = {3, 4}
    await rig.play([(i not in full, i in (0, 4), delta) for i, delta in enumerate(deltas)])
    assert content(rig.writer.got)[0]["text"] == "abcdefgh"
    assert (rig.writer.pulled, rig.writer.pushed) == (3, 5)


async def test_what_the_reader_can_not_show_ends_his_stream_and_nothing_else(
    texts: TokenTexts,
) -> None:
    rig = Rig(1, 0, texts, takes=True)
    task = asyncio.create_task(rig.respond())
    await turn()
    good, *_ = deltas_of(1, [(0, "a")], logprobs=True)
    bad = CoreDelta("r", 1, 0, "b", (1,), (TokenLogprob(1 << 31, -0.5),), Usage(7, 3, 2))
    assert rig.link.sink.put(good, time.monotonic())
    await turn()
    assert rig.link.sink.put(bad, time.monotonic()), "the link goes on"
    await asyncio.wait_for(task, PATIENCE_S)
    assert DONE not in rig.writer.got
    assert set(json.loads(events(rig.writer.got)[-1])) == {"error"}
    assert not rig.writer.clean
    assert len(rig.link.frames) == 1, "the replica is told to stop"
    assert b'warmroute_stream_errors_total{cause="internal"} 1.0' in rig.metrics.text()


class Quiet:
    """Answers of which nothing has to be pulled: `script` is run by the waiting, step by step."""

    def __init__(self, script: Sequence[Any]) -> None:
        self.waits_s: list[float] = []
        self._script = iter(script)

    def headers(self) -> dict[str, str]:
        return {}

    def keep_ours(self) -> None:
        pass

    async def next(self, idle_s: float, direct: Direct | None = None) -> list[Any]:
        self.waits_s.append(idle_s)
        return next(self._script)(direct)


async def test_O5_a_comment_comes_when_nothing_was_sent_for_long_pushes_included(
    texts: TokenTexts,
) -> None:
    now_s = 100.0
    writer = Writer(takes=True)
    first, second, end = deltas_of(1, [(0, "a"), (0, "b")], logprobs=False)

    def pushed_at_10(direct: Direct) -> list[Any]:
        nonlocal now_s
        now_s += 10.0
        direct.give(second, now_s)
        now_s += 5.0
        return []

    def nothing(direct: Direct) -> list[Any]:
        nonlocal now_s
        now_s += 10.0
        return []

    answers = Quiet([lambda _: [(0, first)], pushed_at_10, nothing, lambda _: [(0, end)]])
    reply = ChatStream(HEAD, ChatRequest("tiny", MESSAGES, Controls()), texts)
    await Pump(writer, answers, reply, Metrics(), 15.0, clock=lambda: now_s).respond()
    assert answers.waits_s == [15.0, 15.0, 10.0, 15.0]
    assert writer.got.count(KEEP_ALIVE) == 1
    assert writer.got.index(KEEP_ALIVE) > writer.got.index(b'"content":"b"')
    assert writer.clean


async def test_O5_a_comment_comes_while_what_passes_by_a_chute_has_no_text(
    texts: TokenTexts,
) -> None:
    now_s = 100.0
    writer = Writer(takes=True)
    first, empty, end = deltas_of(1, [(0, "a"), (0, "")], logprobs=False)

    def passed_at_10(direct: Direct) -> list[Any]:
        nonlocal now_s
        channel = direct.channel()
        assert channel is not None
        now_s += 10.0
        channel.took(empty, now_s)
        now_s += 5.0
        return []

    answers = Quiet([lambda _: [(0, first)], passed_at_10, lambda _: [(0, end)]])
    reply = ChatStream(HEAD, ChatRequest("tiny", MESSAGES, Controls()), texts)
    await Pump(writer, answers, reply, Metrics(), 15.0, clock=lambda: now_s).respond()
    assert writer.got.count(KEEP_ALIVE) == 1
    assert writer.clean
