"""A LoRA adapter through the real gateway: asked for as a model, computed as merged weights are."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from configs.model.card import load_card
from configs.model.weights import open_weights
from tests.e2e.conftest import ADAPTER, MODEL
from tests.e2e.up import Up
from tests.fakes.adapters import write_adapter
from tests.replica.engine.schedules import Engine, Schedule
from tests.replica.lora.merged import merged_runner
from tests.waiting import wait_until

PROMPT = "Tell me of the sea, and of all that sails on it, at length, please."
TOKENS = 12


def ask(client: OpenAI, model: str, prompt: str = PROMPT) -> tuple[str, int]:
    """The text, and what of the prompt was cached."""
    answer = client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=TOKENS,
        temperature=0.0,
        extra_body={"ignore_eos": True},
    )
    assert answer.model == model
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens or 0


def test_it_is_listed_with_its_parent(client: OpenAI) -> None:
    listed = {model.id: model.to_dict() for model in client.models.list()}
    assert listed[ADAPTER]["parent"] == MODEL
    assert listed[MODEL]["parent"] is None
    assert client.models.retrieve(ADAPTER).id == ADAPTER
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, "tiny/parrot")
    assert caught.value.code == "model_not_found"


def test_its_answers_are_those_of_merged_weights(
    client: OpenAI, tiny_model: Path, adapter: Path
) -> None:
    card = load_card(tiny_model)
    runner = merged_runner(card, adapter)
    ids = card.tokenizer.encode(PROMPT)
    merged = Engine(runner, Schedule()).run([ids], TOKENS).tokens[0]
    text, _ = ask(client, ADAPTER)
    assert text == card.tokenizer.decode(merged)
    plain, _ = ask(client, MODEL)
    assert plain != text


def test_C3_neither_finds_the_others_blocks_and_each_its_own(up: Up, client: OpenAI) -> None:
    prompt = "Neither of the two may find what the other one has computed here. " * 3
    found = {model: ask(client, model, prompt) for model in (ADAPTER, MODEL)}
    assert {cached for _, cached in found.values()} == {0}
    warm_of = dict(found)

    def warm(model: str) -> bool:
        warm_of[model] = ask(client, model, prompt)
        return warm_of[model][1] >= 32

    for model in found:
        wait_until(lambda model=model: warm(model))
        assert warm_of[model][0] == found[model][0]


def test_the_choice_reckons_with_its_blocks(up: Up, client: OpenAI) -> None:
    prompt = "Both ends must make the same keys of one prompt, or nothing is ever found. " * 3
    asked = {"tenant": "default", "model": ADAPTER, "prompt": prompt, "max_tokens": 2}
    body = json.dumps(asked).encode()
    admin_key = json.loads((up.state / "keys.json").read_text())["admin_key"]
    ask(client, ADAPTER, prompt)

    def predicted() -> int:
        status, said = up.call("POST", "/router/explain", body, key=admin_key)
        assert status == 200, said
        return json.loads(said)["predicted_cached_tokens"]

    wait_until(lambda: predicted() >= 32)
    assert predicted() == ask(client, ADAPTER, prompt)[1]


def test_prompts_are_made_warm_for_an_adapter(up: Up, client: OpenAI) -> None:
    prompt = "What will be asked of the pirate may be computed before anybody asks. " * 3
    admin_key = json.loads((up.state / "keys.json").read_text())["admin_key"]
    body = {"tenant": "default", "model": ADAPTER, "prompt": prompt, "replicas": 2}
    status, said = up.call("POST", "/router/warm", json.dumps(body).encode(), key=admin_key)
    assert status == 200, said
    assert min(of["cached_tokens"] for of in json.loads(said)["replicas"]) >= 32
    assert ask(client, ADAPTER, prompt)[1] >= 32
    assert ask(client, MODEL, prompt)[1] == 0
    body["model"] = "tiny/parrot"
    status, _ = up.call("POST", "/router/warm", json.dumps(body).encode(), key=admin_key)
    assert status == 404


@pytest.mark.slow
def test_the_default_model_speaks_differently(tmp_path: Path, real_model: Path) -> None:
    folder = write_adapter(tmp_path / "a", open_weights(real_model).shape, rank=8, size=0.3)
    up = Up(tmp_path / "state", "--port", "0", "--replicas", "1", "--lora", f"other={folder}")
    try:
        up.wait_ready()
        with OpenAI(base_url=f"{up.url}/v1", api_key=up.key, max_retries=0) as client:
            models = [model.id for model in client.models.list()]
            assert "other" in models
            base = next(model for model in models if model != "other")
            texts = [ask(client, model)[0] for model in (base, "other", base, "other")]
        assert texts[:2] == texts[2:]
        assert texts[0] != texts[1]
    finally:
        up.close()
