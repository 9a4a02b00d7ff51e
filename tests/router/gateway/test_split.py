"""A prompt computed by one replica and answered by another one: in order, once, and never awaited
for longer than it is worth."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import aiohttp
import pytest

from events.errors import CoreError
from events.load import DECODE, PREFILL, PrefillFit
from tests.fakes.scripts import BLOCK_TOKENS, Call, Script, refuse, silent
from tests.router.gateway.halves import (
    LONG,
    ask,
    by_role,
    compute,
    compute_after,
    decision_of,
    enter,
    promise,
)
from tests.router.gateway.house import House, events
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("all_as_busy")


async def test_the_prompt_is_in_the_store_before_the_request_is_sent(
    split: House, http: aiohttp.ClientSession
) -> None:
    computes, answers = by_role(split)
    release = asyncio.Event()
    computes.script = compute_after(release)
    asking = asyncio.create_task(ask(split, http))
    await computes.wait_calls(1)
    assert not answers.calls
    assert split.services.splitter.quota.pledged("d0") == 1
    release.set()
    answer = await asking
    (job,), (request,) = computes.calls, answers.calls
    assert answer["choices"][0]["text"] == "one two three"
    assert answer["headers"]["x-warmroute-replica"] == "d0"
    assert (job.request.sampling.max_tokens, request.request.write_to) == (1, "")
    blocks = (request.prompt_tokens - 1) // BLOCK_TOKENS
    assert job.request.prompt == request.request.prompt[: 4 * blocks * BLOCK_TOKENS]
    assert job.request.request_id == f"{request.request.request_id}-prefill"
    assert request.request.predicted_cached_tokens == blocks * BLOCK_TOKENS
    made = await decision_of(split, http, answer)
    assert (made["hand_off"], made["prefilled_by"]) == ("split", "p0")
    assert made["hand_off_ms"] > 0
    assert split.services.splitter.totals == {"split": 1}
    await split.settled()
    assert split.services.splitter.quota.pledged("d0") == 0


async def test_short_prompts_are_answered_at_once(
    split: House, http: aiohttp.ClientSession
) -> None:
    computes, _ = by_role(split)
    answer = await ask(split, http, prompt="hi")
    assert not computes.calls
    assert (await decision_of(split, http, answer))["hand_off"] == "short"


async def dies(call: Call) -> None:
    call.replica.break_links()


async def writes_nothing(call: Call) -> None:
    await call.write(0)


async def answers_twice(call: Call) -> None:
    await call.write()
    await call.write()
    await call.send("and a word", finish="stop")


@pytest.mark.parametrize(
    ("script", "verdict"),
    [
        (dies, "failed"),
        (writes_nothing, "not_written"),
        (refuse(CoreError(status=503, message="x", reroute=True)), "failed"),
        (refuse(CoreError(status=500, message="x")), "failed"),
        (answers_twice, "split"),
    ],
)
async def test_whatever_goes_wrong_there_the_answer_is_the_same(
    split: House, http: aiohttp.ClientSession, script: Script, verdict: str
) -> None:
    computes, answers = by_role(split)
    computes.script = script
    answer = await ask(split, http)
    assert answer["choices"][0]["text"] == "one two three"
    assert len(answers.calls) == 1
    assert (await decision_of(split, http, answer))["hand_off"] == verdict
    assert split.services.splitter.totals == {verdict: 1}
    await split.settled()


@pytest.mark.parametrize("script", [dies, refuse(CoreError(status=500, message="x")), silent])
async def test_K2_what_one_can_not_compute_another_one_does(
    split: House, http: aiohttp.ClientSession, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.split.hand_off.LEAST_S", 0.3)
    monkeypatch.setattr("router.split.hand_off.PATIENCE", 0.0)
    computes, answers = by_role(split)
    other = await enter(split, "p1", PREFILL, prefill=PrefillFit(1.0, 1.05, 0.0, 1.0))
    computes.script, other.script = script, compute
    answer = await ask(split, http)
    made = await decision_of(split, http, answer)
    assert answer["choices"][0]["text"] == "one two three"
    assert (made["hand_off"], made["prefilled_by"]) == ("split", "p1")
    assert [len(replica.calls) for replica in (computes, other, answers)] == [1, 1, 1]
    splitter = split.services.splitter
    assert (splitter.totals, splitter.taken_over) == ({"split": 1}, 1)
    await split.settled()
    assert splitter.quota.pledged("d0") == 0


async def test_two_that_fail_are_enough(split: House, http: aiohttp.ClientSession) -> None:
    for number in (1, 2):
        (await enter(split, f"p{number}", PREFILL)).script = dies
    split.replicas[0].script = dies
    answer = await ask(split, http)
    assert (await decision_of(split, http, answer))["hand_off"] == "failed"
    computing = [of for of in split.replicas if of.role == PREFILL]
    assert sum(len(of.calls) for of in computing) == 2
    assert split.services.splitter.totals == {"failed": 1}
    await split.settled()


@pytest.mark.parametrize(("told", "verdict"), [(-5, "not_written"), (1 << 40, "split")])
async def test_a_number_of_blocks_that_can_not_be_costs_no_answer(
    split: House, http: aiohttp.ClientSession, told: int, verdict: str
) -> None:
    computes, answers = by_role(split)

    async def lies(call: Call) -> None:
        await call.send(finish="length", written=told)

    computes.script = lies
    answer = await ask(split, http)
    assert answer["choices"][0]["text"] == "one two three"
    (request,) = answers.calls
    most = request.prompt_tokens - 1 - (request.prompt_tokens - 1) % BLOCK_TOKENS
    splitter = split.services.splitter
    assert splitter.totals == {verdict: 1}
    assert splitter.tokens == (most if verdict == "split" else 0)
    await split.settled()


async def test_one_that_says_nothing_is_given_up(
    split: House, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.split.hand_off.LEAST_S", 0.05)
    monkeypatch.setattr("router.split.hand_off.PATIENCE", 0.0)
    computes, _ = by_role(split)
    computes.script = silent
    answer = await ask(split, http)
    assert (await decision_of(split, http, answer))["hand_off"] == "late"
    assert computes.calls[0].aborted.is_set()
    await split.settled()


async def test_K2_silence_is_noticed_long_before_the_time_is_over(
    build: Callable, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time would be over in minutes: only that nothing is heard of it ends the waiting."""
    monkeypatch.setattr("router.split.hand_off.LEAST_S", 600.0)
    monkeypatch.setattr("router.split.hand_off.SILENT_S", 0.3)
    house: House = await build(replicas=0, first_token_timeout_s=600.0)
    computes = await enter(house, "p0", PREFILL, gives_signs=True)
    await enter(house, "d0", DECODE)

    async def falls_silent(call: Call) -> None:
        computes.fall_silent()
        await call.aborted.wait()

    computes.script = falls_silent
    async with asyncio.timeout(PATIENCE_S):
        answer = await ask(house, http)
    assert answer["choices"][0]["text"] == "one two three"
    made = await decision_of(house, http, answer)
    assert (made["hand_off"], made["prefilled_by"]) == ("late", "")
    await house.settled()


async def test_one_that_works_for_long_is_waited_for_while_it_gives_signs_of_life(
    build: Callable, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.split.hand_off.LEAST_S", 600.0)
    monkeypatch.setattr("router.split.hand_off.LOOK_S", 0.05)
    monkeypatch.setattr("router.split.hand_off.SILENT_S", 0.5)
    house: House = await build(replicas=0, first_token_timeout_s=600.0)
    computes = await enter(house, "p0", PREFILL, gives_signs=True)
    await enter(house, "d0", DECODE)

    async def works(call: Call) -> None:
        before = computes.signs
        await until(lambda: computes.signs > before + 10)
        await call.write()

    computes.script = works
    answer = await ask(house, http)
    made = await decision_of(house, http, answer)
    assert (made["hand_off"], made["prefilled_by"]) == ("split", "p0")
    assert made["hand_off_ms"] > 500.0
    await house.settled()


@pytest.mark.parametrize("stream", [False, True])
async def test_O1_a_client_that_leaves_cancels_the_job(
    split: House, http: aiohttp.ClientSession, stream: bool
) -> None:
    computes, answers = by_role(split)
    computes.script = silent
    asking = asyncio.create_task(ask(split, http, stream=stream))
    await computes.wait_calls(1)
    asking.cancel()
    await until(lambda: computes.calls[0].aborted.is_set())
    await split.settled()
    assert not answers.calls
    assert split.services.splitter.totals == {"client_gone": 1}
    assert split.services.splitter.running == 0


async def test_a_stream_waits_for_its_first_token(
    split: House, http: aiohttp.ClientSession
) -> None:
    async with split.post(http, "/v1/completions", {**LONG, "stream": True}) as response:
        lines = events(await response.read())
    texts = [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]
    assert "".join(texts) == "one two three"
    assert split.services.splitter.totals == {"split": 1}


async def test_an_answer_that_breaks_is_continued_and_not_handed_off_again(
    split: House, http: aiohttp.ClientSession
) -> None:
    computes, answers = by_role(split)

    async def break_once(call: Call) -> None:
        if not call.continuing:
            await call.send("one")
            call.replica.break_links()
        else:
            await call.answer()

    answers.script = break_once
    other = await enter(split, "d1", DECODE)
    other.script = break_once
    answer = await ask(split, http)
    assert answer["choices"][0]["text"] == "one two three"
    assert len(computes.calls) == 1


async def test_with_nobody_to_answer_the_one_that_computes_does(
    split: House, http: aiohttp.ClientSession
) -> None:
    computes, answers = by_role(split)

    async def answer_all(call: Call) -> None:
        await (call.write() if call.request.write_to else call.answer())

    computes.script = answer_all
    await answers.die()
    await split.up(1)
    answer = await ask(split, http)
    assert answer["headers"]["x-warmroute-replica"] == "p0"
    await until(lambda: computes.open_calls == 0)


async def test_many_at_once_stay_within_the_quota(
    build: Callable, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.split.hand_off.LEAST_S", 60.0)
    house: House = await build(replicas=0, split_decode_share=0.25)
    await promise(house, http)
    for name, role in (("p0", PREFILL), ("p1", PREFILL), ("d0", DECODE)):
        await enter(house, name, role, max_running=8)
    *computing, answers = house.replicas
    release = asyncio.Event()

    async def held(call: Call) -> None:
        await release.wait()
        await call.write()

    for replica in computing:
        replica.script = held
    asking = [
        asyncio.create_task(ask(house, http, prompt=f"{number} {LONG['prompt']}"))
        for number in range(6)
    ]
    totals = house.services.splitter.totals
    # What may not be handed over is answered by d0 until it has that share of its seats taken, and
    # then by whoever is cheapest: those that compute hold it back here as well.
    await until(lambda: totals["decode_quota"] == 4)
    replicas = house.replicas
    await until(lambda: sum(len(replica.calls) for replica in replicas) == 6)
    assert len(answers.calls) >= 2
    release.set()
    assert len(await asyncio.gather(*asking)) == 6
    assert totals["split"] == 2
    await house.settled()
