"""What is told of parts that compute and parts that answer, and who is asked in special cases."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from msgspec import structs

from tests.fakes.scripts import echo
from tests.router.gateway.halves import LONG, ask, by_role, compute_after, decision_of
from tests.router.gateway.house import ADMIN_KEY, House

pytestmark = pytest.mark.usefixtures("all_as_busy")


async def scale(house: House, http: aiohttp.ClientSession) -> dict[str, float]:
    async with http.get(f"{house.url}/router/scale") as response:
        said: dict[str, float] = await response.json()
        return said


async def test_each_part_tells_how_much_it_has_to_do(
    split: House, http: aiohttp.ClientSession
) -> None:
    computes, _ = by_role(split)
    release = asyncio.Event()
    computes.script = compute_after(release)
    asking = asyncio.create_task(ask(split, http))
    await computes.wait_calls(1)
    said = await scale(split, http)
    assert said["decode_pressure"] == pytest.approx(1 / 3_686)
    assert said["transfer_pressure"] == 0.0
    release.set()
    await asking
    computes.quiet()
    split.fleet.on_load(
        computes.replica_id,
        computes.boot,
        structs.replace(computes.load(), queued_prefill_tokens=3_000),
    )
    said = await scale(split, http)
    assert 3.0 <= said["prefill_pressure"] < 5.0  # 3 s of work wait there
    assert said["transfer_pressure"] == 0.0  # it was there long before it was expected
    split.services.splitter.moving_share = 0.25
    assert (await scale(split, http))["transfer_pressure"] == 0.25
    async with http.get(f"{split.url}/metrics") as response:
        metrics = await response.text()
    assert 'warmroute_hand_offs_total{verdict="split"} 1.0' in metrics
    assert "warmroute_hand_offs_running 0.0" in metrics
    for part in ("prefill", "decode", "transfer"):
        assert f'warmroute_part_pressure{{part="{part}"}}' in metrics
    assert "warmroute_hand_off_tokens_total 0.0" not in metrics


async def test_explain_says_who_would_compute_it(split: House, http: aiohttp.ClientSession) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    computes, _ = by_role(split)
    for prompt, verdict in ((LONG["prompt"], "split"), ("hi", "short")):
        body = {"prompt": prompt, "max_tokens": 4, "tenant": "alice"}
        path = f"{split.url}/router/explain"
        async with http.post(path, json=body, headers=headers) as response:
            said = await response.json()
        assert (said["hand_off"]["verdict"], said["replica"]) == (verdict, "d0")
    assert not computes.calls
    assert not split.services.splitter.totals


async def test_prompts_are_made_warm_first_where_they_will_be_answered(
    split: House, http: aiohttp.ClientSession
) -> None:
    """Whichever the prompt ranks first: the one that only computes comes when all are asked for."""
    split.replicas[0].script = echo
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}

    async def warmed(prompt: str, replicas: int) -> list[str]:
        body = {"prompt": prompt, "replicas": replicas}
        async with http.post(f"{split.url}/router/warm", json=body, headers=headers) as response:
            return [of["replica"] for of in (await response.json())["replicas"]]

    places = [await warmed(f"number {number} " * 40, 1) for number in range(6)]
    assert places == [["d0"]] * 6
    assert await warmed("everywhere " * 40, 2) == ["d0", "p0"]


async def test_P10_a_prompt_that_is_scored_is_computed_where_it_is_answered(
    split: House, http: aiohttp.ClientSession
) -> None:
    computes, answers = by_role(split)
    answer = await ask(split, http, echo=True, logprobs=1)
    decided = await decision_of(split, http, answer)
    assert decided["replica"] == answers.replica_id
    assert not computes.calls
