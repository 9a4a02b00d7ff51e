"""Chat answers, checked with the official client's own types and accumulator."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat._completions import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from configs.model.card import ModelCard
from events.errors import InvariantError
from events.output import CoreDelta, TokenLogprob, Usage
from router.openai.chat import ChatCollector, ChatStream
from router.openai.logprobs import TokenTexts
from router.openai.schema import ChatRequest, Controls
from router.openai.stream import new_head
from router.openai.tools.choice import Calls
from router.openai.tools.formats import HERMES
from tests.router.openai.bodies import USER
from tests.router.openai.deltas import SERVER_LOST, delta, payloads

HEAD = new_head("chatcmpl", "tiny", "fp_1")


def request(include_usage: bool = False, **controls: Any) -> ChatRequest:
    return ChatRequest("tiny", [USER], Controls(**controls), include_usage=include_usage)


def stream(request_: ChatRequest, texts: TokenTexts, deltas: list[CoreDelta]) -> list[Any]:
    out = ChatStream(HEAD, request_, texts)
    events = payloads([event for each in deltas for event in out.feed(each)])
    for event in events:
        if event != "[DONE]" and "error" not in event:
            ChatCompletionChunk.model_validate(event, strict=True)
    return events


def collect(request_: ChatRequest, texts: TokenTexts, deltas: list[CoreDelta]) -> dict[str, Any]:
    collector = ChatCollector(HEAD, request_, texts)
    for each in deltas:
        collector.feed(each)
    assert collector.progress.done
    body = json.loads(collector.body())
    ChatCompletion.model_validate(body, strict=True)
    return body


@given(st.text(), st.integers(0, 1), st.booleans(), st.sampled_from([None, 0]))
def test_a_chunk_is_what_the_general_encoder_gives(
    texts: TokenTexts, text: str, index: int, include_usage: bool, logprobs: int | None
) -> None:
    out = ChatStream(HEAD, request(include_usage, n=2, logprobs=logprobs), texts)
    choice: dict[str, Any] = {"index": index, "delta": {"content": text}}
    if logprobs is not None:
        choice["logprobs"] = None
    chunk: dict[str, Any] = {
        "id": HEAD.id,
        "object": "chat.completion.chunk",
        "created": HEAD.created,
        "model": "tiny",
        "service_tier": "default",
        "system_fingerprint": "fp_1",
        "choices": [{**choice, "finish_reason": None}],
    }
    if include_usage:
        chunk["usage"] = None
    out.feed(delta("opens both"))
    wanted = [b"data: " + msgspec.json.encode(chunk) + b"\n\n"] if text else []
    assert out.feed(delta(text, child=index)) == wanted


HELLO = [delta("Hel"), delta(""), delta("lo 😀"), delta(" w\n", finish="stop")]


def test_P2_order_of_a_stream(texts: TokenTexts) -> None:
    events = stream(request(), texts, HELLO)
    choices = [event["choices"][0] for event in events[:-1]]
    assert choices[0] == {
        "index": 0,
        "delta": {"role": "assistant", "content": "", "refusal": None},
        "finish_reason": None,
    }
    assert [each["delta"] for each in choices[1:]] == [
        {"content": "Hel"}, {"content": "lo 😀"}, {"content": " w\n"}, {},
    ]  # fmt: skip
    assert [each["finish_reason"] for each in choices] == [None] * 4 + ["stop"]
    assert events[-1] == "[DONE]"
    assert all("usage" not in event for event in events[:-1])
    assert {(event["id"], event["created"], event["model"]) for event in events[:-1]} == {
        (HEAD.id, HEAD.created, "tiny")
    }


def test_P2_usage_is_one_more_chunk_without_choices(texts: TokenTexts) -> None:
    events = stream(request(include_usage=True), texts, HELLO)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["total_tokens"] == 10
    assert events[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert all(event["usage"] is None and event["choices"] for event in events[:-2])


def test_an_answer_of_nothing(texts: TokenTexts) -> None:
    events = stream(request(), texts, [delta(finish="length")])
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, "length"]
    assert collect(request(), texts, [delta(finish="length")])["choices"][0]["message"] == {
        "content": "", "role": "assistant", "refusal": None, "annotations": [],
    }  # fmt: skip


THREE = [
    delta("a", child=2),
    delta("b", child=0),
    delta("c", child=2, finish="stop", usage=Usage(7, 4, 2)),
    delta("d", child=1, finish="length", usage=Usage(7, 6, 5)),
    delta("e", child=0, finish="stop", usage=Usage(7, 0, 3)),
]


def test_P9_three_choices_streamed(texts: TokenTexts) -> None:
    events = stream(request(n=3, include_usage=True), texts, THREE)
    said = {0: "", 1: "", 2: ""}
    finishes = {}
    for event in events[:-2]:
        choice = event["choices"][0]
        said[choice["index"]] += choice["delta"].get("content") or ""
        if choice["finish_reason"]:
            finishes[choice["index"]] = choice["finish_reason"]
    assert said == {0: "be", 1: "d", 2: "ac"}
    assert finishes == {0: "stop", 1: "length", 2: "stop"}
    usage = events[-2]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 10)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_P9_the_first_chunk_is_of_index_0_whoever_speaks_first(texts: TokenTexts) -> None:
    late_first = [
        delta("c", child=2, finish="stop"),
        delta("a", child=0, finish="stop"),
        delta("b", child=1, finish="stop"),
    ]
    events = stream(request(n=3), texts, late_first)
    roles = [event["choices"][0] for event in events[:3]]
    assert [choice["index"] for choice in roles] == [0, 1, 2]
    assert all(choice["delta"]["role"] == "assistant" for choice in roles)
    assert [choice.message.content for choice in accumulate(events).choices] == ["a", "b", "c"]


def test_P9_three_choices_collected(texts: TokenTexts) -> None:
    body = collect(request(n=3), texts, THREE)
    assert [choice["message"]["content"] for choice in body["choices"]] == ["be", "d", "ac"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length", "stop"]
    assert body["usage"]["completion_tokens"] == 10


def accumulate(events: list[Any]) -> ChatCompletion:
    state = ChatCompletionStreamState()
    for event in events:
        if event != "[DONE]":
            state.handle_chunk(ChatCompletionChunk.model_validate(event))
    return state.current_completion_snapshot


@pytest.mark.parametrize("deltas", [HELLO, [delta("x", finish="length")]])
def test_the_clients_accumulator_gives_the_collected_body(
    texts: TokenTexts, deltas: list[CoreDelta]
) -> None:
    whole = accumulate(stream(request(include_usage=True), texts, deltas))
    body = collect(request(), texts, deltas)
    assert whole.choices[0].message.content == body["choices"][0]["message"]["content"]
    assert whole.choices[0].finish_reason == body["choices"][0]["finish_reason"]
    assert whole.usage.model_dump(exclude_none=True) == body["usage"]


@pytest.mark.parametrize(
    "broken",
    [
        delta("tail", finish="error", error=SERVER_LOST),
        delta(finish="abort"),
        delta(finish="error"),
    ],
)
def test_R17_a_failure_never_looks_like_an_end(texts: TokenTexts, broken: CoreDelta) -> None:
    out = ChatStream(HEAD, request(include_usage=True), texts)
    events = payloads(out.feed(delta("text")) + out.feed(broken))
    assert set(events[-1]) == {"error"}
    assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
    assert all(not event["choices"][0]["finish_reason"] for event in events[:-1])
    assert not out.done
    assert out.feed(delta("late")) == []
    assert out.fail(SERVER_LOST) == []


def test_R17_one_failed_choice_ends_the_whole_stream(texts: TokenTexts) -> None:
    out = ChatStream(HEAD, request(n=2), texts)
    out.feed(delta("a", child=0, finish="stop"))
    assert set(payloads(out.feed(delta(child=1, finish="abort")))[-1]) == {"error"}
    assert not out.done


def test_R17_fail_from_outside(texts: TokenTexts) -> None:
    out = ChatStream(HEAD, request(), texts)
    out.feed(delta("a"))
    (event,) = payloads(out.fail(SERVER_LOST))
    lost = {"message": "The replica was lost.", "type": "server_error", "param": None, "code": "x"}
    assert event == {"error": lost}
    assert out.fail(SERVER_LOST) == []


def test_a_stream_that_ended_can_not_fail(texts: TokenTexts) -> None:
    out = ChatStream(HEAD, request(), texts)
    out.feed(delta("a", finish="stop"))
    assert out.done
    assert out.fail(SERVER_LOST) == []


def test_a_failed_answer_is_not_collected(texts: TokenTexts) -> None:
    collector = ChatCollector(HEAD, request(), texts)
    collector.feed(delta("a", finish="error", error=SERVER_LOST))
    assert collector.progress.error == SERVER_LOST
    assert not collector.progress.done


@pytest.mark.parametrize("bad", [delta("x", child=1), delta("x", child=-1), delta("x")])
def test_a_delta_that_can_not_be_is_loud(texts: TokenTexts, bad: CoreDelta) -> None:
    out = ChatStream(HEAD, request(n=1), texts)
    if bad.child == 0:
        out.feed(delta(finish="stop"))
    with pytest.raises(InvariantError):
        out.feed(bad)


def entries(card: ModelCard, text: str, top: int = 0) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(token, -0.5, tuple((5 + i, -1.0 - i) for i in range(top)))
        for token in card.tokenizer.encode(text)
    )


@pytest.mark.parametrize("top", [0, 5])
def test_P10_one_entry_per_token_and_bytes_that_spell_the_text(
    card: ModelCard, texts: TokenTexts, top: int
) -> None:
    first, second = "the 😀", "\n漢 é"
    deltas = [
        delta(first, logprobs=entries(card, first, top)),
        delta(second, logprobs=entries(card, second, top)),
        delta(finish="stop"),
    ]
    tokens = len(entries(card, first)) + len(entries(card, second))
    streamed = []
    for event in stream(request(logprobs=top), texts, deltas)[:-1]:
        logprobs = event["choices"][0]["logprobs"]
        assert (logprobs is None) == (not event["choices"][0]["delta"].get("content"))
        streamed += logprobs["content"] if logprobs else []
    collected = collect(request(logprobs=top), texts, deltas)["choices"][0]["logprobs"]["content"]
    assert streamed == collected
    assert len(streamed) == tokens
    assert bytes(byte for entry in streamed for byte in entry["bytes"]).decode() == first + second
    assert {len(entry["top_logprobs"]) for entry in streamed} == {top}
    assert {entry["logprob"] for entry in streamed} == {-0.5}


def test_P10_tokens_without_text_yet_still_get_their_entries(
    card: ModelCard, texts: TokenTexts
) -> None:
    half = entries(card, "😀")[:2]
    events = stream(request(logprobs=0), texts, [delta("", logprobs=half), delta(finish="stop")])
    assert [len(e["choices"][0]["logprobs"]["content"]) for e in events[1:2]] == [2]


def test_P10_a_special_token_has_no_bytes(card: ModelCard, texts: TokenTexts) -> None:
    special = min(card.tokenizer.special_ids)
    deltas = [delta("", logprobs=(TokenLogprob(special, float("-inf")),), finish="length")]
    body = collect(request(logprobs=0), texts, deltas)
    (entry,) = body["choices"][0]["logprobs"]["content"]
    assert (entry["bytes"], entry["logprob"]) == ([], -9999.0)
    assert entry["token"] == "<|endoftext|>"


def test_P7_a_call_is_one_wherever_its_deltas_are_cut(texts: TokenTexts) -> None:
    asked = msgspec.structs.replace(request(), calls=Calls(HERMES, frozenset(["look"])))
    written = f'Well. {HERMES.opening}{{"name": "look", "arguments": {{"x": 1}}}}{HERMES.closing}'
    deltas = [*map(delta, written), delta(finish="stop")]
    state = ChatCompletionStreamState()
    for event in stream(asked, texts, deltas)[:-1]:
        state.handle_chunk(ChatCompletionChunk.model_validate(event))
    (choice,) = state.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well."
    (call,) = choice.message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"x": 1})


def test_P16_ids_are_ours_and_new(texts: TokenTexts) -> None:
    ids = {new_head("chatcmpl", "tiny", "fp").id for _ in range(100)}
    assert len(ids) == 100
    assert all(each.startswith("chatcmpl-") for each in ids)


def test_what_was_said_is_kept_with_its_ids(texts: TokenTexts) -> None:
    out = ChatStream(HEAD, request(), texts)
    out.feed(delta("a", ids=(4,)))
    out.feed(delta("", ids=(5,)))
    out.feed(delta("bc", ids=(6, 7)))
    (choice,) = out.progress.choices
    assert (choice.text, choice.token_ids) == ("abc", [4, 5, 6, 7])
