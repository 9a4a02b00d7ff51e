"""The other uses: warming and explaining by command, and the live page in a real browser."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.conftest import MODEL
from tests.e2e.up import Up
from tests.waiting import wait_until
from tools import cli

PROMPT = "You are the assistant of a library with very many books and very few readers. " * 8


def command(up: Up, *words: str) -> subprocess.CompletedProcess[str]:
    where = ("--state", str(up.state), "--url", up.url)
    return subprocess.run(
        [sys.executable, "-m", "tools.cli", *words, *where],
        capture_output=True,
        text=True,
        timeout=120,
    )


def warm(up: Up, file: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return command(up, "warm", str(file), *flags)


def test_warm_makes_a_first_request_warm(up: Up, client: OpenAI, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": PROMPT}]
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": messages}) + "\n")
    report = tmp_path / "probe.json"
    run = warm(up, file, "--tenant", "default", "--replicas", "2", "--json", str(report))
    assert run.returncode == 0, run.stdout + run.stderr
    probes = json.loads(report.read_text())[0]["replicas"]
    assert {probe["replica"] for probe in probes} == {"r0", "r1"}
    assert all(probe["cached_tokens"] > 0 for probe in probes)
    answer = client.chat.completions.create(
        model=MODEL, messages=[*messages, {"role": "user", "content": "hi"}], max_tokens=2
    )
    assert answer.usage.prompt_tokens_details.cached_tokens > 64


def test_warm_names_the_bad_line(up: Up, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"messages": []}\nnot json\n')
    run = warm(up, file)
    assert run.returncode == 1
    assert "line 2" in run.stderr
    assert "Traceback" not in run.stderr


def test_explain_tells_what_then_happens(up: Up, client: OpenAI, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Explain yourself, machine. " + PROMPT}]
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": messages, "max_tokens": 2}) + "\n")
    made = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=messages, max_tokens=2
    )
    before = up.get_json("/router/decisions?limit=1")

    def explained() -> dict[str, Any]:
        told = command(up, "explain", str(file), "--json")
        assert told.returncode == 0, told.stderr
        assert "machine" not in told.stdout
        return json.loads(told.stdout)

    # A busy machine can make the other replica the better one for a while.
    wait_until(lambda: explained()["replica"] == made.headers["x-warmroute-replica"])
    answer = explained()
    assert answer["prompt_tokens"] == made.parse().usage.prompt_tokens
    assert answer["predicted_cached_tokens"] > 64
    shown = command(up, "explain", "--prompt", "machine " * 60)
    assert shown.returncode == 0, shown.stderr
    assert "matched blocks" in shown.stdout
    assert "would get it" in shown.stdout
    assert "machine" not in shown.stdout
    assert up.get_json("/router/decisions?limit=1") == before


@pytest.mark.browser
def test_the_dashboard_shows_replicas_and_decisions(up: Up, client: OpenAI, tmp_path: Path) -> None:
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        page = browser.new_page(viewport={"width": 1240, "height": 900})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{up.url}/dashboard")
        for _ in range(3):
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": PROMPT}], max_tokens=4
            )
        # By locators: the page's own policy forbids the polling that evaluates text.
        expect(page.locator(".card")).to_have_count(2, timeout=20_000)
        page.locator("#decisions tr.first").nth(2).wait_for(timeout=20_000)
        expect(page.locator("#ratio")).to_contain_text("%", timeout=20_000)
        fits = "[...document.querySelectorAll('.card')].every(c => c.scrollWidth <= c.clientWidth)"
        assert page.evaluate(fits), "a card's content leaves its card"
        page.screenshot(path=str(tmp_path / "dashboard.png"))
        assert page.inner_text("#state") == "live"
        assert errors == []
        browser.close()


def test_doctor_finds_a_warm_prompt_and_no_worry(up: Up, tmp_path: Path) -> None:
    report = tmp_path / "found.json"
    run = command(up, "doctor", "--json", str(report))
    assert run.returncode == 0, run.stdout + run.stderr
    found = {of["about"]: of for of in json.loads(report.read_text())["findings"]}
    assert found["replicas"]["text"] == "2 of 2 take requests"
    assert found["locality"]["verdict"] == "ok"
    assert cli.main(["doctor", "--capacity", "--state", str(up.state), "--json", str(report)]) == 0
    figures = json.loads(report.read_text())
    (view,) = [of for of in up.get_json("/router/replicas")["replicas"] if of["replica"] == "r0"]
    assert figures["blocks"] == view["hello"]["total_blocks"]
