"""Text completions, checked with the official client's own types."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from openai.types import Completion

from configs.model.card import ModelCard
from events.output import CoreDelta, TokenLogprob, Usage
from router.openai.completions import CompletionCollector, CompletionStream
from router.openai.logprobs import TokenTexts
from router.openai.schema import CompletionRequest, Controls
from router.openai.stream import new_head
from tests.router.openai.deltas import SERVER_LOST, delta, payloads

HEAD = new_head("cmpl", "tiny", "fp_1")
Fed = list[tuple[int, CoreDelta]]


def request(
    *prompts: str | bytes, echo: bool = False, include_usage: bool = False, **controls: Any
) -> CompletionRequest:
    return CompletionRequest(
        "tiny", prompts or ("hi",), Controls(**controls), echo=echo, include_usage=include_usage
    )


def given(choice: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in choice.items() if value is not None}


def stream(request_: CompletionRequest, texts: TokenTexts, fed: Fed) -> list[Any]:
    out = CompletionStream(HEAD, request_, texts)
    events = payloads([event for prompt, each in fed for event in out.feed(each, prompt)])
    for event in events:
        if event != "[DONE]" and "error" not in event:
            # The client's type has no null here, though OpenAI sends it until the end.
            choices = [{"finish_reason": "stop"} | given(each) for each in event["choices"]]
            Completion.model_validate(event | {"choices": choices})
    return events


def collect(request_: CompletionRequest, texts: TokenTexts, fed: Fed) -> dict[str, Any]:
    collector = CompletionCollector(HEAD, request_, texts)
    for prompt, each in fed:
        collector.feed(each, prompt)
    assert collector.progress.done
    body = json.loads(collector.body())
    Completion.model_validate(body)
    return body


def joined(events: list[Any], key: str = "text") -> dict[int, str]:
    said: dict[int, str] = {}
    for event in events:
        for choice in event["choices"] if event != "[DONE]" else []:
            said[choice["index"]] = said.get(choice["index"], "") + choice[key]
    return said


HELLO: Fed = [(0, delta("Hel")), (0, delta("")), (0, delta("lo 😀", finish="length"))]


def test_P2_order_of_a_stream(texts: TokenTexts) -> None:
    events = stream(request(), texts, HELLO)
    assert [event["choices"] for event in events[:-1]] == [
        [{"text": "Hel", "index": 0, "logprobs": None, "finish_reason": None}],
        [{"text": "lo 😀", "index": 0, "logprobs": None, "finish_reason": "length"}],
    ]
    assert events[-1] == "[DONE]"
    assert all("usage" not in event for event in events[:-1])


def test_P2_usage_is_one_more_chunk_without_choices(texts: TokenTexts) -> None:
    events = stream(request(include_usage=True), texts, HELLO)
    assert (events[-1], events[-2]["choices"]) == ("[DONE]", [])
    assert events[-2]["usage"]["prompt_tokens"] == 7
    assert events[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert all(event["usage"] is None and event["choices"] for event in events[:-2])


def test_the_end_without_text_is_still_told(texts: TokenTexts) -> None:
    events = stream(request(), texts, [(0, delta("a")), (0, delta(finish="stop"))])
    assert events[1]["choices"][0] == {
        "text": "", "index": 0, "logprobs": None, "finish_reason": "stop",
    }  # fmt: skip


BATCH: Fed = [
    (1, delta("c", child=0, finish="stop", usage=Usage(5, 1, 1))),
    (0, delta("a", child=0)),
    (0, delta("b", child=1, finish="length", usage=Usage(7, 6, 2))),
    (1, delta("d", child=1, finish="stop", usage=Usage(5, 0, 3))),
    (0, delta("A", child=0, finish="stop", usage=Usage(7, 4, 4))),
]


def test_P9_prompts_and_choices_are_numbered_in_order(texts: TokenTexts) -> None:
    two = request("x", "y", n=2, include_usage=True)
    events = stream(two, texts, BATCH)
    body = collect(two, texts, BATCH)
    assert joined(events) == {0: "aA", 1: "b", 2: "c", 3: "d"}
    assert [choice["text"] for choice in body["choices"]] == ["aA", "b", "c", "d"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert events[-2]["usage"] == body["usage"]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (12, 10)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


def scored(*logprobs: float) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(5, logprob) for logprob in logprobs)


CANDIDATES: Fed = [
    (0, delta("long", child=0, logprobs=scored(-0.5, -0.5), usage=Usage(7, 4, 2))),
    (1, delta("b", child=2, logprobs=scored(-1.0), finish="stop", usage=Usage(5, 0, 2))),
    (0, delta("short", child=1, logprobs=scored(-0.9), finish="stop", usage=Usage(7, 6, 2))),
    (0, delta("", child=2, finish="stop", usage=Usage(7, 6, 1))),
    (1, delta("c", child=1, logprobs=scored(-1.0), finish="length", usage=Usage(5, 0, 1))),
    (0, delta("er", child=0, logprobs=scored(-0.5), finish="length", usage=Usage(7, 4, 3))),
    (1, delta("a", child=0, logprobs=scored(-9.0), finish="length", usage=Usage(5, 0, 1))),
]


@pytest.mark.parametrize("logprobs", [None, 0])
def test_best_of_shows_the_highest_mean_logprob_and_counts_all(
    logprobs: int | None, texts: TokenTexts
) -> None:
    body = collect(request("x", "y", n=2, best_of=3, logprobs=logprobs), texts, CANDIDATES)
    choices = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert choices == [(0, "longer"), (1, "short"), (2, "c"), (3, "b")]
    assert body["choices"][0]["finish_reason"] == "length"
    shown = [choice["logprobs"] for choice in body["choices"]]
    if logprobs is None:
        assert shown == [None] * 4
    else:
        assert [lists["token_logprobs"] for lists in shown] == [[-0.5] * 3, [-0.9], [-1.0], [-1.0]]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (12, 10)


def test_as_many_answers_as_are_shown_keep_their_order(texts: TokenTexts) -> None:
    fed = [
        (0, delta(text, child=child, logprobs=scored(logprob), finish="stop"))
        for child, (text, logprob) in enumerate((("bad", -5.0), ("good", -0.1)))
    ]
    body = collect(request("x", n=2, best_of=2, logprobs=0), texts, fed)
    assert [choice["text"] for choice in body["choices"]] == ["bad", "good"]


def test_echo_repeats_each_prompt_once(card: ModelCard, texts: TokenTexts) -> None:
    ids = card.tokenizer.encode("yes ")
    prompts = ("x ", struct.pack(f"<{len(ids)}I", *ids))
    said = [(text, end, child) for child in (0, 1) for text, end in (("1", None), ("2", "stop"))]
    fed = [(p, delta(text, child=c, finish=end)) for p in (0, 1) for text, end, c in said]
    events = stream(request(*prompts, n=2, echo=True), texts, fed)
    body = collect(request(*prompts, n=2, echo=True), texts, fed)
    assert joined(events) == {0: "x 12", 1: "x 12", 2: "yes 12", 3: "yes 12"}
    assert [choice["text"] for choice in body["choices"]] == list(joined(events).values())


def test_R17_a_failure_never_looks_like_an_end(texts: TokenTexts) -> None:
    out = CompletionStream(HEAD, request(include_usage=True), texts)
    broken = delta("tail", finish="error", error=SERVER_LOST)
    events = payloads(out.feed(delta("text")) + out.feed(broken))
    assert [event["choices"][0]["text"] for event in events[:-1]] == ["text", "tail"]
    assert all(not event["choices"][0]["finish_reason"] for event in events[:-1])
    assert events[-1]["error"]["message"] == "The replica was lost."
    assert not out.done
    assert out.feed(delta("late")) == []


def logprob(token: int, *top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(token, -0.25, top)


def test_P10_lists_are_parallel_in_both_modes(card: ModelCard, texts: TokenTexts) -> None:
    first, second = "the", " 😀é"
    heard = [tuple(map(logprob, card.tokenizer.encode(text))) for text in (first, second)]
    fed = [
        (0, delta(first, logprobs=heard[0])),
        (0, delta(second, logprobs=heard[1], finish="stop")),
    ]
    wanted = request("hé", logprobs=0)
    lists = collect(wanted, texts, fed)["choices"][0]["logprobs"]
    streamed = [event["choices"][0]["logprobs"] for event in stream(wanted, texts, fed)[:-1]]
    for name in lists:
        assert lists[name] == [value for each in streamed for value in each[name]]
        assert len(lists[name]) == len(card.tokenizer.encode(first) + card.tokenizer.encode(second))
    assert lists["text_offset"][0] == 2
    assert lists["text_offset"][-1] == 2 + len(first + second) - 1
    assert lists["text_offset"] == sorted(lists["text_offset"])
    assert lists["tokens"][-1].startswith("bytes:\\x")
    assert all(
        token in top for token, top in zip(lists["tokens"], lists["top_logprobs"], strict=True)
    )


def test_P10_alternatives_stand_beside_the_chosen_token(card: ModelCard, texts: TokenTexts) -> None:
    a, b, c = (card.tokenizer.encode(letter)[0] for letter in "abc")
    fed = [(0, delta("a", logprobs=(logprob(a, (b, -1.0), (c, float("-inf"))),), finish="stop"))]
    lists = collect(request(logprobs=2), texts, fed)["choices"][0]["logprobs"]
    assert lists["top_logprobs"] == [{"b": -1.0, "c": -9999.0, "a": -0.25}]
    assert (lists["tokens"], lists["token_logprobs"]) == (["a"], [-0.25])


def test_P10_a_special_token_takes_no_room_in_the_text(card: ModelCard, texts: TokenTexts) -> None:
    special, plain = min(card.tokenizer.special_ids), card.tokenizer.encode("a")[0]
    fed = [(0, delta("a", logprobs=(logprob(special), logprob(plain)), finish="length"))]
    lists = collect(request("", logprobs=1), texts, fed)["choices"][0]["logprobs"]
    assert lists["text_offset"] == [0, 0]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_an_answer_of_nothing(texts: TokenTexts, logprobs: int | None) -> None:
    body = collect(request(logprobs=logprobs), texts, [(0, delta(finish="length"))])
    assert body["choices"][0]["text"] == ""
    assert (body["choices"][0]["logprobs"] is None) == (logprobs is None)


def test_P17_one_event_may_be_very_long(texts: TokenTexts) -> None:
    text = "x" * 2_000_000
    assert joined(stream(request(), texts, [(0, delta(text, finish="stop"))])) == {0: text}
