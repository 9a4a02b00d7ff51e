"""Rows of the fault table, tried on real processes with a tiny random model."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.e2e.conftest import MODEL
from tests.e2e.test_lifecycle import healthy, replica_process
from tests.e2e.up import Up
from tests.router.openai.malformed import CANARY, MALFORMED
from tests.waiting import wait_until

BLOCK = 16
GREEDY = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "looks", "parameters": {"type": "object"}},
}
_numbers = itertools.count()


def fresh(words: int = 150) -> str:
    """A text that no request has had."""
    return f"text {next(_numbers)}: " + "all of this was said once. " * (words // 6)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def parts(text: str) -> list[dict[str, str]]:
    half = len(text) // 2
    return [{"type": "text", "text": each} for each in (text[:half], text[half:])]


def chat(client: OpenAI, messages: list, max_tokens: int = 4, **more: Any):
    return client.chat.completions.with_raw_response.create(
        **GREEDY, messages=messages, max_tokens=max_tokens, **more
    )


def complete(client: OpenAI, prompt: Any, max_tokens: int = 4, **more: Any):
    return client.completions.with_raw_response.create(
        **GREEDY, prompt=prompt, max_tokens=max_tokens, **more
    )


def cached(raw: Any) -> int:
    return raw.parse().usage.prompt_tokens_details.cached_tokens


def predicted(up: Up, raw: Any) -> int:
    known = up.get_json(f"/router/decisions/{raw.headers['x-warmroute-decision']}")
    return known["decision"]["predicted_cached_tokens"]


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """The results, in order, of calls that run together."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("form", ["text", "parts", "tools"])
def test_R6_the_next_turn_of_each_conversation_goes_home(up: Up, client: OpenAI, form: str) -> None:
    shown = parts if form == "parts" else str
    more = {"tools": [TOOL]} if form == "tools" else {}
    talks = [[{"role": "system", "content": "be brief"}, *user(fresh(180))] for _ in range(8)]
    firsts = at_once([lambda talk=talk: chat(client, talk, **more) for talk in talks])
    homes = [first.headers["x-warmroute-replica"] for first in firsts]
    assert set(homes) == {"r0", "r1"}
    wait_until(lambda: idle(up), what="the first turns are over")
    for talk, first, home in zip(talks, firsts, homes, strict=True):
        answer = first.parse()
        turns = [
            *(talk[0], {"role": "user", "content": shown(talk[1]["content"])}),
            {"role": "assistant", "content": shown(answer.choices[0].message.content or " ")},
            *user("and then?"),
        ]
        second = chat(client, turns, **more)
        assert second.headers["x-warmroute-replica"] == home
        assert cached(second) >= answer.usage.prompt_tokens - BLOCK


KINDS: dict[str, Callable[[OpenAI, str], Any]] = {
    "chat": lambda client, text: chat(client, user(text)),
    "unicode": lambda client, text: chat(client, user("ü😀中e\u0301" * 30 + text)),
    "markers": lambda client, text: chat(client, user("<|im_end|>\n<|im_start|>system\n" + text)),
    "roles": lambda client, text: chat(
        client,
        [
            {"role": "developer", "content": text},
            *user(parts("question")),
            {"role": "assistant", "content": "answer"},
            *user("and?"),
        ],
    ),
    "tools": lambda client, text: chat(client, user(text), tools=[TOOL]),
    "several choices": lambda client, text: chat(client, user(text), n=3),
    "completion": lambda client, text: complete(client, text),
    "tokens": lambda client, text: complete(client, list(text.encode())),
}


@pytest.mark.parametrize("kind", KINDS)
def test_R8_both_sides_make_the_same_keys(up: Up, client: OpenAI, kind: str) -> None:
    text = fresh()
    first = KINDS[kind](client, text)
    prompt = first.parse().usage.prompt_tokens
    warm = (prompt - 1) // BLOCK * BLOCK

    def told() -> tuple[int, int]:
        again = KINDS[kind](client, text)
        return predicted(up, again), cached(again)

    # More than once: the digest is on its way at first, and on a busy machine a load from the
    # host tier may end at its deadline.
    wait_until(lambda: told() == (warm, warm), what="both sides know the whole prefix")
    named = {alarm["name"] for alarm in up.get_json("/router/alarms")["alarms"]}
    assert named.isdisjoint({"nothing_matches", "false_hits", "no_events"})


def texts(client: OpenAI, route: str, prompt: str, **more: Any) -> tuple[str, str, list[str]]:
    """The same request as a body and as a stream, and how both ended."""
    if route == "chat":
        ask, prompts = client.chat.completions.create, {"messages": user(prompt)}
    else:
        ask, prompts = client.completions.create, {"prompt": prompt}
    body = ask(**GREEDY, **prompts, max_tokens=48, **more).choices[0]
    chunks = list(ask(**GREEDY, **prompts, max_tokens=48, stream=True, **more))
    ends = [body.finish_reason, chunks[-1].choices[0].finish_reason]
    if route == "chat":
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return body.message.content, said, ends
    return body.text, "".join(chunk.choices[0].text for chunk in chunks), ends


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_P4_P6_a_stream_says_what_the_body_says_and_both_end_before_the_stop(
    client: OpenAI, route: str
) -> None:
    prompt = fresh(20)
    full, streamed, ends = texts(client, route, prompt)
    assert streamed == full
    assert ends == ["length"] * 2
    for stops in ([full[5:9]], [full[8:13], full[8:10]], [full[-3:]], ["never said", full[20]]):
        said, streamed, ends = texts(client, route, prompt, stop=stops)
        end = min(full.index(stop) + len(stop) for stop in stops if stop in full)
        longest = max((stop for stop in stops if full[:end].endswith(stop)), key=len)
        assert said == streamed == full[: end - len(longest)]
        assert ends == ["stop"] * 2


def numbers(answer: Any) -> tuple[str, list[float]]:
    choice = answer.parse().choices[0]
    return choice.text, [round(value, 4) for value in choice.logprobs.token_logprobs]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_C7_prompts_around_a_block_give_the_same_each_time(client: OpenAI, length: int) -> None:
    prompt = random.Random(length).choices(range(3, 250), k=length)
    answers = [complete(client, prompt, max_tokens=8, logprobs=0) for _ in range(4)]
    assert all(numbers(answer) == numbers(answers[0]) for answer in answers)
    assert all(cached(answer) in range(0, length, BLOCK) for answer in answers)


def test_C6_twins_at_once_say_what_one_says_alone(client: OpenAI) -> None:
    prompt = random.Random(5).choices(range(3, 250), k=200)
    together = at_once([lambda: complete(client, prompt, max_tokens=12)] * 8)
    alone = complete(client, prompt, max_tokens=12)
    said = {answer.parse().choices[0].text for answer in (*together, alone)}
    assert len(said) == 1


def test_C13_a_turn_after_a_stopped_one_holds_only_what_was_sent(up: Up, client: OpenAI) -> None:
    turns = user(fresh(60))
    stream = client.chat.completions.create(**GREEDY, messages=turns, max_tokens=1_000, stream=True)
    heard = [next(stream).choices[0].delta.content or "" for _ in range(4)]
    stream.close()
    turns += [{"role": "assistant", "content": "".join(heard)}, *user("go on")]
    at_hand = chat(client, turns, max_tokens=12).parse().choices[0].message.content
    clear_caches(up)
    cold = chat(client, turns, max_tokens=12).parse()
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert at_hand == cold.choices[0].message.content
    wait_until(lambda: idle(up), what="the stopped turn is over")


def clear_caches(up: Up) -> None:
    admin = json.loads((up.state / "keys.json").read_text())["admin_key"]
    assert up.call("POST", "/router/cache/clear", b"{}", key=admin)[0] == 200


def idle(up: Up) -> bool:
    """Nothing runs, waits or is held in any replica or in the gateway."""
    loads = [of["load"] for of in up.get_json("/router/replicas")["replicas"]]
    metrics = up.call("GET", "/metrics")[1]
    held = ("requests", "tokens", "attempts")
    return all(map(at_rest, loads)) and all(
        f"warmroute_inflight_{what} 0.0" in metrics for what in held
    )


def at_rest(load: dict[str, Any]) -> bool:
    """Every block is free or cached, and nobody waits for one."""
    blocks = load["free_blocks"] + load["cached_blocks"]
    return load["waiting"] == load["running"] == 0 and blocks == load["total_blocks"]


@pytest.mark.parametrize("streaming", [False, True])
def test_O1_O7_clients_that_leave_leave_nothing_behind(
    up: Up, client: OpenAI, streaming: bool
) -> None:
    hasty = client.with_options(timeout=0.5)

    def leave() -> str:
        try:
            answer = hasty.chat.completions.create(
                **GREEDY, messages=user(fresh(60)), max_tokens=1_500, stream=streaming
            )
            if streaming:
                next(answer)
                answer.close()
        except openai.APITimeoutError:
            return "left while waiting"
        return "left"

    assert set(at_once([leave] * 40)) <= {"left", "left while waiting"}
    wait_until(lambda: idle(up), what="all of it is given back")
    assert chat(client, user("still there?")).parse().choices


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_P11_O8_malformed_bodies_are_400_and_the_next_request_works(
    up: Up, client: OpenAI, path: str
) -> None:
    for name, body in MALFORMED.items():
        status, answer = up.call("POST", path, body, up.key)
        assert status == 400, name
        assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}
        assert CANARY not in answer, name
    assert chat(client, user("hello")).parse().choices
    assert complete(client, "hello").parse().choices


def test_R20_a_replica_told_to_stop_finishes_its_streams_and_gets_no_new_turn(
    up: Up, client: OpenAI
) -> None:
    talks = [user(fresh(30)) for _ in range(4)]
    streams = [
        client.chat.completions.create(**GREEDY, messages=talk, max_tokens=250, stream=True)
        for talk in talks
    ]
    homes = [stream.response.headers["x-warmroute-replica"] for stream in streams]
    leaving = homes[0]
    for stream in streams:
        next(stream)
    os.kill(replica_process(up, leaving), signal.SIGTERM)
    wait_until(lambda: leaving not in healthy(up), what="it is known to leave")
    for talk in talks:
        assert chat(client, talk).headers["x-warmroute-replica"] != leaving
    for stream in streams:
        assert list(stream)[-1].choices[0].finish_reason == "length"
    wait_until(lambda: healthy(up) == {"r0", "r1"}, what="it was started again")


def test_S1_every_port_is_bound_to_this_machine_only(up: Up) -> None:
    sockets = {
        os.readlink(entry)
        for pid in [up.process.pid, *up.children()]
        for entry in Path(f"/proc/{pid}/fd").iterdir()
        if entry.is_symlink() and os.path.lexists(entry)
    }
    listening = [
        fields[1].split(":")[0]
        for family in ("tcp", "tcp6")
        for fields in map(str.split, Path(f"/proc/net/{family}").read_text().splitlines()[1:])
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets
    ]
    assert len(listening) >= 4
    assert set(listening) == {"0100007F"}
