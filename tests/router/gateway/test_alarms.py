"""Alarms leave the router: on the bus, on the page, in the metrics."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path

import aiohttp
import msgspec
import pytest

from events.alarm import AlarmNotice
from router.fleet.fleet import Fleet
from router.telemetry.beacon import Beacon
from tests.router.gateway.house import COMPLETION, House
from tests.waiting import PATIENCE_S, until

SUBJECT = "wr.v1.local.router.router-0.alarm"


@pytest.fixture(autouse=True)
def no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted replicas say nothing after their hello: alarms would come, or go, by time."""
    monkeypatch.setattr(Fleet, "check", lambda _: None)


async def heard(house: House) -> list[AlarmNotice]:
    notices: list[AlarmNotice] = []
    await house.bus.subscribe(
        SUBJECT, lambda _, data: notices.append(msgspec.msgpack.decode(data, type=AlarmNotice))
    )
    return notices


async def first_view(house: House, http: aiohttp.ClientSession) -> dict:
    async with http.get(f"{house.url}/dashboard/events") as response:
        return msgspec.json.decode((await response.content.readline()).removeprefix(b"data: "))


async def test_an_alarm_is_told_when_it_comes_and_when_it_goes(house: House) -> None:
    notices = await heard(house)
    house.fleet.alarms.raise_("false_hits", "r0", "test")
    house.fleet.alarms.raise_("false_hits", "r0", "test")
    house.fleet.alarms.clear("false_hits", "r0")
    house.fleet.alarms.clear("false_hits", "r0")
    await until(lambda: len(notices) >= 2)
    told = [(of.name, of.replica, of.active, of.count) for of in notices]
    assert told == [("false_hits", "r0", True, 1), ("false_hits", "r0", False, 2)]


async def test_who_comes_late_hears_of_what_is_on(house: House) -> None:
    house.fleet.alarms.raise_("false_hits", "r1", "test")
    notices: list[AlarmNotice] = []
    beacon = Beacon(house.fleet, notices.append, period_s=0.01)
    await beacon.start()
    await until(lambda: len(notices) > 2)
    await beacon.close()
    assert {(of.name, of.replica, of.active) for of in notices} == {("false_hits", "r1", True)}
    assert notices[-1].age_ms >= notices[0].age_ms > 0


async def test_a_round_that_fails_is_not_the_last(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = asyncio.Queue()

    def broken() -> None:
        rounds.put_nowait(1)
        raise RuntimeError

    beacon = Beacon(house.fleet, lambda _: None, period_s=0.01)
    with monkeypatch.context() as patched:
        patched.setattr(house.fleet, "check", broken)
        await beacon.start()
        async with asyncio.timeout(PATIENCE_S):
            await rounds.get()
            await rounds.get()
        await beacon.close()


async def test_alarms_are_on_the_page_and_in_the_metrics(
    house: House, http: aiohttp.ClientSession
) -> None:
    notices = await heard(house)
    house.fleet.alarms.raise_("false_hits", "r0", "test")
    house.fleet.alarms.raise_("false_hits", "r1", "test")
    house.fleet.alarms.clear("false_hits", "r1")
    await until(lambda: len(notices) >= 3)
    (shown,) = (await first_view(house, http))["alarms"]
    assert (shown["name"], shown["replica"], shown["router"]) == ("false_hits", "r0", "router-0")
    async with http.get(f"{house.url}/metrics") as response:
        text = await response.text()
    assert 'warmroute_alarms{name="false_hits"} 1.0' in text
    assert 'warmroute_alarms_raised_total{name="false_hits"} 2.0' in text


@pytest.mark.parametrize("lie", [1_000_000, -5])
async def test_more_cached_than_was_sent_is_not_counted_and_has_a_name(
    house: House, http: aiohttp.ClientSession, lie: int
) -> None:
    house.script(lambda call: call.answer(cached=lie))
    async with house.post(http, "/v1/completions", {**COMPLETION, "prompt": "x " * 90}) as told:
        replica, decision = (told.headers[f"x-warmroute-{of}"] for of in ("replica", "decision"))
        await told.read()
    await house.settled()
    prompt_tokens = house.calls[0].prompt_tokens
    outcome = house.services.brain.decisions.get(decision).outcome
    assert (outcome.prompt_tokens, outcome.cached_tokens) == (
        prompt_tokens,
        prompt_tokens if lie > 0 else 0,
    )
    text = house.services.metrics.text().decode()
    counted = dict(re.findall(r"^(warmroute_\w+_tokens_total)(?:{.*})? (\S+)$", text, re.MULTILINE))
    assert 0 <= float(counted["warmroute_cached_tokens_total"]) <= prompt_tokens
    assert 0 <= float(counted["warmroute_tenant_cached_tokens_total"]) <= prompt_tokens
    assert 0 <= float(counted["warmroute_trust_skipped_tokens_total"]) <= prompt_tokens
    assert house.fleet.alarms.active("impossible_usage", replica)


@pytest.mark.browser
async def test_the_page_names_alarms(house: House, tmp_path: Path) -> None:
    from playwright.async_api import async_playwright

    async with async_playwright() as play:
        browser = await play.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        page = await browser.new_page(viewport={"width": 1240, "height": 500})
        await page.goto(f"{house.url}/dashboard")
        await page.get_by_text("live", exact=True).wait_for()
        assert await page.inner_text("#alarms") == "no alarms"
        house.fleet.alarms.raise_("false_hits", "r0", "test <b>")
        house.fleet.alarms.raise_("stale_digest", "r1", "no word of its cache for seconds")
        await page.locator("#alarms span").nth(1).wait_for()
        assert (await page.inner_text("#alarms")).startswith("false_hits")
        await page.screenshot(path=str(tmp_path / "alarms.png"))
        house.fleet.alarms.forget("r0")
        house.fleet.alarms.forget("r1")
        await page.locator("#alarms.calm").wait_for()
        await browser.close()
