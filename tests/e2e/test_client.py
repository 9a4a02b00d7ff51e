"""The official client against the real gateway, replicas and bus."""

from __future__ import annotations

import json
import threading

import openai
import pytest
from openai import OpenAI

from tests.e2e.conftest import MODEL
from tests.e2e.up import Up

LONG = "All work and no play makes a long and warm prefix for the cache to hold. " * 12


def ask(client: OpenAI, text: str, **more):
    """One raw chat answer with its headers."""
    settings = {"max_tokens": 8, "temperature": 0, **more}
    return client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": text}], **settings
    )


def test_chat(client: OpenAI) -> None:
    answer = ask(client, "Say hello.").parse()
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.completion_tokens <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_equals_body(client: OpenAI) -> None:
    whole = ask(client, "Count to ten.", max_tokens=16).parse()
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Count to ten."}],
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_and_token_prompts(client: OpenAI) -> None:
    text = client.completions.create(model=MODEL, prompt="once upon a time", max_tokens=4)
    assert text.choices[0].finish_reason in ("length", "stop")
    tokens = client.completions.create(model=MODEL, prompt=[5, 6, 7, 8], max_tokens=4)
    assert tokens.usage.prompt_tokens == 4


def test_P9_three_choices(client: OpenAI) -> None:
    answer = ask(client, "Pick a word.", n=3, temperature=1.0, seed=3, max_tokens=6).parse()
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens <= 18


def test_best_of_are_the_likeliest_of_the_same_seeds(client: OpenAI) -> None:
    def complete(**more):
        return client.completions.create(
            model=MODEL, prompt="once upon a time", max_tokens=6, temperature=1.5, seed=7, **more
        )

    def mean(choice) -> float:
        scores = choice.logprobs.token_logprobs
        return sum(scores) / len(scores)

    every = complete(n=5, logprobs=0)
    ranked = sorted(every.choices, key=mean, reverse=True)
    assert len({choice.text for choice in ranked}) > 2
    best = complete(n=2, best_of=5)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert all(choice.logprobs is None for choice in best.choices)
    assert best.usage.completion_tokens == every.usage.completion_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        complete(best_of=2, stream=True)
    assert refused.value.param == "best_of"


def test_seed_repeats(client: OpenAI) -> None:
    one, two = (
        ask(client, "Be random.", seed=11, temperature=1.0, max_tokens=12).parse() for _ in range(2)
    )
    assert one.choices[0].message.content == two.choices[0].message.content


def test_logprobs(client: OpenAI) -> None:
    answer = ask(client, "Say it.", logprobs=True, top_logprobs=2, max_tokens=3).parse()
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in entries)


def test_models(client: OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]


def test_P15_errors_have_the_clients_types(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as empty:
        client.chat.completions.create(model=MODEL, messages=[])
    assert empty.value.code == "empty_array"
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, "word " * 20_000)
    assert long.value.code == "context_length_exceeded"


def test_a_wrong_key_is_refused(up: Up) -> None:
    with OpenAI(base_url=f"{up.url}/v1", api_key="sk-wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as refused:
            stranger.models.list()
        assert refused.value.code == "invalid_api_key"


def test_R8_the_second_request_finds_what_the_router_predicted(up: Up, client: OpenAI) -> None:
    first = ask(client, LONG)
    for _ in range(40):
        second = ask(client, LONG)
        decision = up.get_json(f"/router/decisions/{decision_id(second)}")
        if decision["decision"]["predicted_cached_tokens"]:
            break
    usage = second.parse().usage
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached >= usage.prompt_tokens - 2 * 16
    assert decision["decision"]["predicted_cached_tokens"] == cached
    assert replica(first) == replica(second)
    assert {term["replica"] for term in decision["decision"]["candidates"]} == {"r0", "r1"}


def decision_id(raw) -> str:
    return raw.headers["x-warmroute-decision"]


def replica(raw) -> str:
    return raw.headers["x-warmroute-replica"]


def test_S2_another_tenant_finds_nothing(up: Up, client: OpenAI) -> None:
    secret = LONG + "this part is only ours"
    ask(client, secret)
    ask(client, secret)
    body = {"model": MODEL, "messages": [{"role": "user", "content": secret}], "max_tokens": 2}
    status, answer = up.call("POST", "/v1/chat/completions", json.dumps(body).encode())
    assert status == 200
    assert json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"] < 32


def test_P16_one_id_twice_at_once(client: OpenAI) -> None:
    texts: list[str] = []

    def one() -> None:
        answer = ask(client, "Same id.", extra_headers={"x-request-id": "twin"}, max_tokens=24)
        texts.append(answer.parse().choices[0].message.content)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(texts) == 2
    assert texts[0] == texts[1]


def test_O8_no_prompt_in_any_log(up: Up, client: OpenAI) -> None:
    canary = "kanarienvogel-7731"
    ask(client, f"secret {canary}")
    status, body = up.call("POST", "/v1/chat/completions", f'{{"messages": "{canary}"'.encode())
    assert status == 400
    assert canary not in body
    assert canary not in up.call("GET", "/metrics")[1]
    assert canary not in up.logs()
    assert canary not in up.output
