"""Prompts computed by one process and answered by another one; each of them may die on the way."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APITimeoutError, OpenAI

from tests.e2e.conftest import MODEL
from tests.e2e.test_lifecycle import healthy, replica_process
from tests.e2e.test_rows import complete, fresh
from tests.e2e.up import Up, descendants
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow
TOKENS = 24


@contextlib.contextmanager
def fleet(state: Path, model: Path, each: int) -> Iterator[Up]:
    """So many that compute, and that answer."""
    flags = ("--model", str(model), "--model-name", MODEL, "--dtype", "float32")
    up = Up(state, "--port", "0", "--prefill", str(each), "--decode", str(each), *flags)
    try:
        up.wait_ready()
        all_well(up, each)
        promise(up)
        yield up
    finally:
        up.close()


def promise(up: Up) -> None:
    """Gaps between tokens that nobody keeps: roles are needed."""
    admin = json.loads((up.state / "keys.json").read_text())["admin_key"]
    policy = json.dumps({"itl_deadline_ms": 0.01}).encode()
    assert up.call("PUT", "/router/tenants/default", policy, key=admin)[0] == 200


def all_well(up: Up, each: int) -> None:
    names = {f"{role}{number}" for role in "pd" for number in range(each)}
    wait_until(lambda: healthy(up) == names, 120.0, what="all are well")


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Up]:
    """One that computes and one that answers; tests leave them well."""
    with fleet(tmp_path_factory.mktemp("split"), tiny_model, 1) as up:
        yield up


@pytest.fixture(scope="module")
def twos(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Up]:
    """Two of each; tests leave them well."""
    with fleet(tmp_path_factory.mktemp("twos"), tiny_model, 2) as up:
        yield up


def speaker(up: Up) -> OpenAI:
    return OpenAI(base_url=f"{up.url}/v1", api_key=up.key, max_retries=0, timeout=60)


@pytest.fixture
def client(split: Up) -> Iterator[OpenAI]:
    with speaker(split) as client:
        yield client


def ask(up: Up, client: OpenAI, prompt: str) -> tuple[str, dict[str, Any], int]:
    """The text, its decision, and how many tokens of the prompt were not computed to answer it."""
    raw = complete(client, prompt, TOKENS)
    made = up.get_json(f"/router/decisions/{raw.headers['x-warmroute-decision']}")["decision"]
    answer = raw.parse()
    return answer.choices[0].text, made, answer.usage.prompt_tokens_details.cached_tokens


def clear(up: Up) -> None:
    admin = json.loads((up.state / "keys.json").read_text())["admin_key"]
    assert up.call("POST", "/router/cache/clear", b"{}", key=admin)[0] == 200


def colocated(up: Up, client: OpenAI, prompt: str) -> str:
    """The same answer, computed where it is answered: with nobody else to do it."""
    clear(up)
    os.kill(replica_process(up, "p0"), signal.SIGKILL)
    wait_until(lambda: healthy(up) == {"d0"}, what="it is missed")
    text, made, cached = ask(up, client, prompt)
    wait_until(lambda: healthy(up) == {"p0", "d0"}, 60, what="it is back")
    assert (made["prefilled_by"], cached) == ("", 0)
    return text


def handed_off(up: Up, client: OpenAI) -> tuple[str, str]:
    """A prompt that took the long way, and its answer. On a busy machine that may cost more, until
    what was learnt of a slow hand-off fades."""
    took: list[tuple[str, str]] = []

    def asked() -> bool:
        prompt = fresh(600)
        text, made, cached = ask(up, client, prompt)
        assert made["replica"] == "d0"
        if made["hand_off"] == "split" and cached > 0:
            assert made["prefilled_by"] == "p0"
            took.append((prompt, text))
        return bool(took)

    wait_until(asked, 60, what="a hand-off")
    return took[0]


def counted(up: Up, name: str) -> float:
    (line,) = re.findall(rf"^warmroute_{name} (\S+)$", up.call("GET", "/metrics")[1], re.M)
    return float(line)


def running(up: Up) -> float:
    return counted(up, "hand_offs_running")


class Asked:
    """A request in a thread of its own."""

    def __init__(self, up: Up, client: OpenAI, prompt: str) -> None:
        self.result: tuple[str, dict[str, Any], int] | None = None

        def work() -> None:
            self.result = ask(up, client, prompt)

        self._thread = threading.Thread(target=work)
        self._thread.start()

    def end(self) -> tuple[str, dict[str, Any], int]:
        self._thread.join(60)
        assert self.result is not None
        return self.result


@contextlib.contextmanager
def stands_still(up: Up, name: str) -> Iterator[int]:
    """The replica's process, stopped."""
    pid = replica_process(up, name)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def stopped(up: Up, client: OpenAI, then: Callable[[int], None]) -> dict[str, Any]:
    """A request whose prompt is being computed by a process that stands still, until `then`: as
    soon as one is handed off at all, which on a busy machine may cost more."""
    deadline_s = time.monotonic() + 2 * PATIENCE_S
    while time.monotonic() < deadline_s:
        handed_off(up, client)
        prompt = fresh(600)
        with stands_still(up, "p0") as pid:
            asked = Asked(up, client, prompt)
            wait_until(lambda: running(up) or asked.result, what="it is placed")  # noqa: B023
            begun = asked.result is None
            if begun:
                then(pid)
            text, made, _ = asked.end()
        assert made["replica"] == "d0"
        wait_until(lambda: running(up) == 0.0, what="nothing is under way")
        assert text == ask(up, client, prompt)[0]
        if begun:
            return made
    raise AssertionError(made["hand_off"])


def test_the_tokens_are_those_of_one_place_for_both(split: Up, client: OpenAI) -> None:
    prompt, text = handed_off(split, client)
    assert colocated(split, client, prompt) == text


def test_K2_one_that_is_killed_while_it_computes_costs_nothing_but_time(
    split: Up, client: OpenAI
) -> None:
    made = stopped(split, client, lambda pid: os.kill(pid, signal.SIGKILL))
    assert made["hand_off"] == "failed"
    wait_until(lambda: healthy(split) == {"p0", "d0"}, 60, what="it is back")
    handed_off(split, client)


def test_K2_one_that_hangs_is_not_waited_for(split: Up, client: OpenAI) -> None:
    made = stopped(split, client, lambda pid: None)
    assert made["hand_off"] in ("failed", "late")
    wait_until(lambda: healthy(split) == {"p0", "d0"}, 60, what="it is well again")


def test_O1_who_leaves_takes_the_work_along(split: Up, client: OpenAI) -> None:
    def left() -> bool:
        handed_off(split, client)
        with (
            stands_still(split, "p0"),
            speaker(split).with_options(timeout=0.5) as hurried,
        ):
            with contextlib.suppress(APITimeoutError):
                complete(hurried, fresh(600), TOKENS)
            wait_until(lambda: running(split) == 0.0, what="nothing is under way")
        return 'verdict="client_gone"' in split.call("GET", "/metrics")[1]

    wait_until(left, 2 * PATIENCE_S, what="one left while its prompt was computed")
    wait_until(lambda: healthy(split) == {"p0", "d0"}, 60, what="it is well again")


def test_K6_a_store_that_dies_costs_nothing_but_time(split: Up, client: OpenAI) -> None:
    pids = descendants(split.process.pid)
    (kvd,) = (p for p in pids if b"kvstore.kvd" in Path(f"/proc/{p}/cmdline").read_bytes())
    os.kill(kvd, signal.SIGKILL)
    prompt = fresh(600)
    text, made, _ = ask(split, client, prompt)
    assert made["replica"] == "d0"
    assert made["hand_off"] in ("split", "not_written", "costs_more", "late")
    wait_until(lambda: "kvd is back" in split.output, 60, what="it is started again")
    assert ask(split, client, prompt)[0] == text
    handed_off(split, client)


@pytest.mark.parametrize("dies", [False, True])
def test_K2_another_one_computes_what_one_that_hangs_or_dies_does_not(twos: Up, dies: bool) -> None:
    """As soon as a prompt is handed to it at all: on a busy machine that may cost more."""
    before = counted(twos, "hand_offs_taken_over_total")

    def taken_over() -> bool:
        hang(twos, dies)
        return counted(twos, "hand_offs_taken_over_total") > before

    wait_until(taken_over, 120, what="one was taken over")


def hang(up: Up, dies: bool) -> None:
    """Requests while one of those that compute stands still, or is killed then; all are answered,
    and rightly."""
    with speaker(up) as client:
        with stands_still(up, "p0") as pid:
            prompts = [fresh(600) for _ in range(6)]
            asked = [Asked(up, client, prompt) for prompt in prompts]
            wait_until(lambda: running(up) or all(one.result for one in asked))
            if dies:
                os.kill(pid, signal.SIGKILL)
            answers = [one.end() for one in asked]
        wait_until(lambda: running(up) == 0.0, what="nothing is under way")
        all_well(up, 2)
        for prompt, (text, made, _) in zip(prompts, answers, strict=True):
            assert made["replica"] != "p0"
            assert text == ask(up, client, prompt)[0]


def test_K2_one_that_dies_while_it_answers_is_stood_in_for_once(twos: Up) -> None:
    prompt, tokens = fresh(600), 200
    with speaker(twos) as client:
        stream = client.completions.with_raw_response.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        text, ends, used = "", [], 0
        for number, chunk in enumerate(stream.parse()):
            if number == 3:
                os.kill(replica_process(twos, stream.headers["x-warmroute-replica"]), 9)
            used = chunk.usage.completion_tokens if chunk.usage else used
            text += "".join(choice.text for choice in chunk.choices)
            ends += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        assert (ends, used) == (["length"], tokens)
        all_well(twos, 2)
        assert text == complete(client, prompt, tokens).parse().choices[0].text
