"""What a lost replica had in flight moves to another one, which begins anew or goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import aiohttp
import pytest

from events.errors import QUEUE_LONGER, CoreError, UserError
from router.dispatch.failover import RetryBudget
from router.openai.stream import DONE
from tests.fakes.scripts import Call, echo, refuse, stall
from tests.router.gateway.house import CHAT, COMPLETION, House, events
from tests.router.gateway.rig import Rig, collect
from tests.waiting import until

REQUESTS = 80
"""More than the budget of retries holds."""


async def read(house: House, http: aiohttp.ClientSession) -> bytes:
    async with house.post(http, "/v1/chat/completions", {**CHAT, "stream": True}) as response:
        return await response.read()


async def test_R17_all_that_a_lost_replica_had_not_begun_moves(
    house: House, http: aiohttp.ClientSession
) -> None:
    release = asyncio.Event()
    house.script(stall(release))
    reading = [asyncio.create_task(read(house, http)) for _ in range(REQUESTS)]
    await until(lambda: len(house.calls) == REQUESTS)
    victim = house.calls[0].replica
    assert sum(call.replica is victim for call in house.calls) > 20
    house.script(echo)
    await victim.die()
    release.set()
    bodies = await asyncio.gather(*reading)
    assert all(body.endswith(DONE) for body in bodies)
    await house.settled()


async def overtaken(call: Call) -> None:
    """As if others had filled this replica's queue."""
    if call.request.believed_queue_tokens is None:
        await call.answer()
    else:
        await call.refuse(CoreError(status=429, message="x", code=QUEUE_LONGER, reroute=True))


async def test_R1_a_request_that_was_sent_to_a_longer_queue_moves_once_without_credit(
    build: Callable, http: aiohttp.ClientSession
) -> None:
    house = await build(replicas=2, retries=0)
    house.script(overtaken)
    for _ in range(REQUESTS):
        before = len(house.calls)
        async with house.post(http, "/v1/chat/completions", CHAT) as response:
            assert response.status == 200
        first, second = sorted(house.calls, key=lambda call: call.request.dispatch_seq)[before:]
        assert first.replica is not second.replica
        assert (first.request.believed_queue_tokens, second.request.attempt) == (0, 2)
    await house.settled()


@pytest.mark.parametrize("retries", [0, 1, 2])
async def test_a_request_is_tried_no_more_often_than_it_may_however_many_there_are(
    build: Callable, http: aiohttp.ClientSession, retries: int
) -> None:
    house = await build(replicas=4, retries=retries)
    house.script(refuse(CoreError(status=500, message="broken", type="server_error")))
    async with house.post(http, "/v1/chat/completions", CHAT) as response:
        assert response.status == 500
    assert len(house.calls) == 1 + retries
    await house.settled()


async def test_R1_a_request_with_nowhere_else_to_go_stays(
    build: Callable, http: aiohttp.ClientSession
) -> None:
    house = await build(replicas=1)
    house.script(overtaken)
    async with house.post(http, "/v1/chat/completions", CHAT) as response:
        assert response.status == 200
    assert [call.request.attempt for call in house.calls] == [1]
    await house.settled()


async def test_R1_when_the_others_have_gone_meanwhile_it_comes_back(
    house: House, http: aiohttp.ClientSession
) -> None:
    async def alone(call: Call) -> None:
        for other in house.replicas:
            if other is not call.replica:
                await other.die()
        await house.up(1)
        await overtaken(call)

    house.script(alone)
    async with house.post(http, "/v1/chat/completions", CHAT) as response:
        assert response.status == 200
    assert len({call.replica for call in house.calls}) == 1
    await house.settled()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "n": 2}),
        ("/v1/completions", {**COMPLETION, "prompt": ["a", "b", "c"]}),
    ],
)
async def test_R17_a_plain_answer_survives_the_loss_of_its_replica_half_way(
    house: House, http: aiohttp.ClientSession, path: str, body: dict
) -> None:
    """Nothing was delivered yet: where nobody can continue it is made anew elsewhere, and only the
    new one is told."""
    house.cannot_continue()
    lost = []

    async def break_half_way(call) -> None:
        lost.append(call.replica)
        if call.replica is not lost[0]:
            await call.answer()
            return
        await call.send("lost")
        call.replica.break_links()

    house.script(break_half_way)
    async with house.post(http, path, body) as response:
        answer = json.loads(await response.read())
    assert response.status == 200, answer
    texts = [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]
    assert set(texts) == {"one two three"}
    await house.settled()


async def break_in_stream(call) -> None:
    """The first replica gives two words and breaks; the next one goes on."""
    if call.continuing:
        await call.answer(cached=5)
        return
    await call.send("one", cached=3)
    await call.send(" two", cached=3)
    call.replica.break_links()


async def test_R16_a_broken_stream_goes_on_elsewhere_as_one_stream(
    house: House, http: aiohttp.ClientSession
) -> None:
    house.script(break_in_stream)
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with house.post(http, "/v1/chat/completions", body) as response:
        raw = await response.read()
    *chunks, done = events(raw)
    assert done == b"[DONE]"
    documents = [json.loads(chunk) for chunk in chunks]
    choices = [choice for document in documents for choice in document["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert text == "one two three"
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert sum("role" in choice["delta"] for choice in choices) == 1
    usage = documents[-1]["usage"]
    assert usage["completion_tokens"] == 3
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    first, second = sorted(house.calls, key=lambda call: call.request.attempt)
    assert second.request.attempt == 2
    assert second.request.sampling == first.request.sampling
    assert list(second.request.progress[0].token_ids()) == [1, 1]
    assert 0 < second.request.e2e_deadline_ms < first.request.e2e_deadline_ms
    metrics = house.services.metrics.text().decode()
    assert "warmroute_continuations_total 1.0" in metrics
    assert "warmroute_continued_tokens_total 2.0" in metrics
    assert "warmroute_completion_tokens_total 3.0" in metrics
    records = house.services.brain.decisions.latest(2)
    assert sorted(r.decision.attempt for r in records) == [1, 2]
    assert len({r.decision.request_id for r in records}) == 1
    await house.settled()


async def test_R16_a_stream_may_break_more_than_once(
    build: Callable, http: aiohttp.ClientSession
) -> None:
    house = await build(replicas=3)
    words = ("one", " two", " three")

    async def a_word_each(call: Call) -> None:
        said = len(call.request.progress[0].output) // 4 if call.continuing else 0
        await call.send(words[said])
        if said < 2:
            call.replica.break_links()
        else:
            await call.send(finish="stop")

    house.script(a_word_each)
    for _ in range(2):
        body = await read(house, http)
        assert body.endswith(DONE)
        assert all(body.count(word.encode()) == 1 for word in words)
        await house.up(3)
    assert max(call.request.attempt for call in house.calls) == 3
    await house.settled()


async def test_R16_finished_choices_are_not_generated_again(
    house: House, http: aiohttp.ClientSession
) -> None:
    async def one_choice_ends(call) -> None:
        if call.continuing:
            assert [child.finished for child in call.request.progress] == [True, False]
            await call.answer()
            return
        await call.send("whole", child=0)
        await call.send(child=0, finish="stop")
        await call.send("one", child=1)
        call.replica.break_links()

    house.script(one_choice_ends)
    for stream in (True, False):
        async with house.post(
            http, "/v1/completions", {**COMPLETION, "n": 2, "stream": stream}
        ) as r:
            raw = await r.read()
        documents = [json.loads(e) for e in events(raw) if e != b"[DONE]"] or [json.loads(raw)]
        texts = ["", ""]
        for choice in (choice for document in documents for choice in document["choices"]):
            texts[choice["index"]] += choice["text"]
        assert texts == ["whole", "one two three"]
        await house.up(2)


async def test_R17_a_lost_replicas_streams_all_go_on(
    house: House, http: aiohttp.ClientSession
) -> None:
    """However many there are: they come from there no more."""
    begun, release = [], asyncio.Event()

    async def begin(call) -> None:
        if not call.continuing:
            await call.send("one")
            begun.append(call)
            await release.wait()
        await call.send(" two", finish="stop")

    house.script(begin)
    reading = [asyncio.create_task(read(house, http)) for _ in range(REQUESTS)]
    await until(lambda: len(begun) == REQUESTS)
    await begun[0].replica.die()
    release.set()
    for body in await asyncio.gather(*reading):
        assert body.endswith(DONE)
        assert (body.count(b"one"), body.count(b" two")) == (1, 1)
    await house.settled()


@pytest.mark.parametrize("code", ["draining", "engine_unavailable"])
async def test_R20_all_that_a_leaving_replica_could_not_finish_goes_on_elsewhere(
    house: House, http: aiohttp.ClientSession, code: str
) -> None:
    begun, release = [], asyncio.Event()
    leaving = CoreError(status=503, message="bye", type="server_error", code=code, reroute=True)

    async def leave(call: Call) -> None:
        if not call.continuing:
            await call.send("one")
        if call.request.attempt > 1:
            await call.send(" two", finish="stop")
            return
        begun.append(call)
        await release.wait()
        await call.refuse(leaving)

    house.script(leave)
    reading = [asyncio.create_task(read(house, http)) for _ in range(REQUESTS)]
    await until(lambda: len(begun) == REQUESTS)
    release.set()
    for body in await asyncio.gather(*reading):
        assert body.endswith(DONE)
        assert (body.count(b"one"), body.count(b" two")) == (1, 1)
    faults = {view.breaker for view in house.fleet.replicas()}
    assert faults == {"closed"} or code != "draining"
    await house.settled()


async def test_R16_a_pinned_stream_does_not_move(rig: Rig) -> None:
    rig.replicas[0].script = break_in_stream
    with pytest.raises(UserError):
        await collect(rig.run(pin="r0"))
    assert not rig.replicas[1].calls


async def test_R16_continuations_share_the_budget_and_the_limit(rig: Rig) -> None:
    texts: list[str] = []

    async def fail(call) -> None:
        if not call.continuing:
            await call.send("one")
            await until(lambda: bool(texts))
        await call.refuse(CoreError(status=500, message="broken", type="server_error"))

    for replica in rig.replicas:
        replica.script = fail
    rig.budget = RetryBudget(ratio=0.0, most=1.0)
    for _ in range(2):
        texts.clear()
        with pytest.raises(UserError) as caught:
            await collect(rig.run(), texts)
        assert caught.value.error.message == "broken"
    assert sum(len(replica.calls) for replica in rig.replicas) == 3
    assert rig.listener.continuations == 1
    await until(rig.idle)


async def test_R16_who_cannot_continue_is_not_asked_to(rig: Rig) -> None:
    rig.replicas[0].script = break_in_stream
    rig.links.get("r1").continues = False
    with pytest.raises(UserError) as caught:
        await collect(rig.run())
    assert caught.value.error.code == "replica_unreachable"
    assert not rig.replicas[1].calls
