"""P15: our errors, bodies and chunks against what OpenAI was recorded to send."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import structs

from events.errors import CoreError, UserError
from router.openai.chat import ChatCollector, ChatStream
from router.openai.completions import CompletionCollector, CompletionStream
from router.openai.errors import to_response
from router.openai.logprobs import TokenTexts
from router.openai.parse import parse_chat, parse_completion
from router.openai.schema import ChatRequest, CompletionRequest, Limits
from router.openai.stream import new_head
from tests.router.openai.deltas import delta, payloads

FOLDER = Path(__file__).parents[4] / "shared" / "data" / "openai-cassettes"
pytestmark = [
    pytest.mark.traces,
    pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no recordings at {FOLDER}"),
]

KNOWN_MODELS = frozenset({"gpt-5-nano", "babbage-002", "gpt-3.5-turbo-instruct"})
REFUSED = {
    "chat-multimodal": "messages[0].content[1].type",
    "completion-suffix": "suffix",
}
"""What OpenAI served and this server refuses by name."""

PADDING = "obfuscation"


def recording(name: str) -> tuple[bytes, int, str]:
    """(request body, status, response body)."""
    (entry,) = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["interactions"]
    return entry["request"]["body"].encode(), entry["response"]["code"], entry["response"]["body"]


def names(prefix: str = "") -> list[str]:
    found = sorted(path.stem for path in FOLDER.glob("*.yaml")) if FOLDER.is_dir() else []
    return [name for name in found if name.startswith(prefix)] or ["none"]


@pytest.fixture(scope="module")
def openai_limits(limits: Limits) -> Limits:
    return structs.replace(limits, models=KNOWN_MODELS, vocab=200_000, context_tokens=8_192)


def parse(name: str, body: bytes, limits: Limits) -> ChatRequest | CompletionRequest | CoreError:
    try:
        return (parse_chat if name.startswith("chat") else parse_completion)(body, limits)
    except UserError as error:
        return error.error


def shape(value: Any) -> Any:
    """Key sets all the way down; lists by their first entry."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items() if key != PADDING}
    return [shape(value[0])] if isinstance(value, list) and value else None


def covers(ours: Any, recorded: Any, path: str = "$") -> None:
    """Every recorded key is there; usage may say more, nothing else may."""
    if isinstance(recorded, dict):
        assert isinstance(ours, dict), path
        extra = set() if path.endswith("usage") else set(ours) - set(recorded)
        assert not set(recorded) - set(ours), path
        assert not extra, path
        for key, value in recorded.items():
            covers(ours[key], value, f"{path}.{key}")
    elif isinstance(recorded, list):
        assert isinstance(ours, list), path
        covers(ours[0], recorded[0], f"{path}[]")


@pytest.mark.parametrize("name", names())
def test_P15_status_and_error(name: str, openai_limits: Limits) -> None:
    body, status, answer = recording(name)
    ours = parse(name, body, openai_limits)
    if name in REFUSED:
        assert isinstance(ours, CoreError)
        assert (ours.status, ours.param) == (400, REFUSED[name])
    elif status == 200:
        assert not isinstance(ours, CoreError)
    else:
        said = json.loads(to_response(ours).body)["error"]
        recorded = json.loads(answer)["error"]
        assert ours.status == status
        assert set(said) == set(recorded)
        assert (said["type"], said["param"]) == (recorded["type"], recorded["param"])
        # That model wants another parameter instead; ours takes max_tokens and names its minimum.
        if name != "chat-bad-request":
            assert said == recorded


def served(prefix: str, streaming: bool) -> list[str]:
    return [
        name
        for name in names(prefix)
        if name != "none"
        and name not in REFUSED
        and recording(name)[1] == 200
        and recording(name)[2].startswith("data:") is streaming
        and "tools" not in name
    ] or ["none"]


def feed(out: Any, request: ChatRequest | CompletionRequest) -> list[bytes]:
    """Each choice says two things and stops."""
    prompts = len(request.prompts) if isinstance(request, CompletionRequest) else 1
    events: list[bytes] = []
    for prompt in range(prompts):
        for child in range(request.controls.n):
            for each in (delta("a", child=child), delta("b", child=child, finish="stop")):
                events += out.feed(each, prompt) or []
    return events


@pytest.mark.parametrize("name", served("chat", False) + served("completion", False))
def test_P15_key_sets_of_bodies(name: str, openai_limits: Limits, texts: TokenTexts) -> None:
    body, _, answer = recording(name)
    request = parse(name, body, openai_limits)
    kind = ChatCollector if isinstance(request, ChatRequest) else CompletionCollector
    collector = kind(new_head("x", "m", "fp"), request, texts)
    feed(collector, request)
    ours, recorded = json.loads(collector.body()), json.loads(answer)
    covers(shape(ours), shape(recorded))
    assert ours["object"] == recorded["object"]
    assert len(ours["choices"]) == len(recorded["choices"])


@pytest.mark.parametrize("name", served("chat", True) + served("completion", True))
def test_P15_chunks_and_their_order(name: str, openai_limits: Limits, texts: TokenTexts) -> None:
    body, _, answer = recording(name)
    request = parse(name, body, openai_limits)
    kind = ChatStream if isinstance(request, ChatRequest) else CompletionStream
    ours = payloads(feed(kind(new_head("x", "m", "fp"), request, texts), request))
    lines = [line.encode() + b"\n\n" for line in answer.split("\n\n") if line.strip()]
    recorded = payloads(lines)
    assert ours[-1] == recorded[-1] == "[DONE]"
    for which in (0, -2):
        covers(shape(ours[which]), shape(recorded[which]))
        assert ours[which]["object"] == recorded[which]["object"]
    finishing = [bool(e["choices"] and e["choices"][0]["finish_reason"]) for e in ours[:-1]]
    their_end = [bool(e["choices"] and e["choices"][0]["finish_reason"]) for e in recorded[:-1]]
    assert finishing[::-1].index(True) == their_end[::-1].index(True)
    assert sum(finishing) == sum(their_end) == 1
