"""Dynamo as a peer: the model as it reads one, and the worker that forwards. Dynamo itself is asked
where WARMROUTE_DYNAMO names a folder that has it."""

from __future__ import annotations

import json
import os
import runpy
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tokenizers import Tokenizer

from configs.model.card import load_card
from tools.bench import peers
from tools.bench.child import Child, until
from tools.bench.live.folder import write_model
from tools.fetch import default_model

TEXT = "Wörter, 123 words\n and <|im_start|> as text"
USAGE = {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}
DYNAMO = os.environ.get("WARMROUTE_DYNAMO")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(default_model(), tmp_path_factory.mktemp("dynamo") / "model", weights=False)


@pytest.fixture
async def server() -> AsyncIterator[TestServer]:
    """Answers any completion with TEXT, in pieces; keeps what it was asked."""

    async def complete(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        request.app[ASKED].append(asked)
        answer = web.StreamResponse()
        await answer.prepare(request)
        pieces = [TEXT[at : at + 7] for at in range(0, len(TEXT), 7)]
        chunks: list[dict[str, Any]] = [{"choices": [{"text": piece}]} for piece in pieces]
        chunks += [{"choices": [{"text": "", "finish_reason": "length"}]}]
        chunks += [{"choices": [], "usage": USAGE}]
        for chunk in chunks:
            await answer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer

    app = web.Application()
    app[ASKED] = []
    app.router.add_post("/v1/completions", complete)
    async with TestServer(app) as running:
        yield running


ASKED = web.AppKey("asked", list)


def test_the_model_that_dynamo_reads_makes_the_same_tokens(model_folder: Path) -> None:
    card = load_card(default_model())
    theirs = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    message = {"role": "user", "content": "Wörter, 123 words\n and more"}
    segments = card.template.render([message], add_generation_prompt=True)
    rendered = "".join(segment.text for segment in segments)
    assert theirs.encode(rendered, add_special_tokens=False).ids == card.tokenizer.encode_segments(
        segments
    )
    said = json.loads((model_folder / "tokenizer_config.json").read_text())
    assert said["chat_template"] == card.template.source
    config = json.loads((model_folder / "config.json").read_text())
    assert set(config["eos_token_id"]) == set(card.eos_ids)


async def test_a_worker_gives_tokens_that_are_its_servers_text(
    server: TestServer, model_folder: Path
) -> None:
    script = runpy.run_path(str(peers.DYNAMO))
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    request = {
        "token_ids": [1, 4093, 198],
        "stop_conditions": {"max_tokens": 5, "ignore_eos": True},
        "sampling_options": {"temperature": 0.5},
    }
    async with aiohttp.ClientSession() as session:
        worker = script["Forwarder"](session, tokenizer, str(server.make_url("")).rstrip("/"), "m")
        chunks = [chunk async for chunk in worker.generate(request, None)]
    ids = [token for chunk in chunks for token in chunk["token_ids"]]
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXT
    assert chunks[-1]["finish_reason"] == "length"
    assert chunks[-1]["completion_usage"] == USAGE
    (asked,) = server.app[ASKED]
    assert asked["prompt"] == [1, 4093, 198]
    assert (asked["max_tokens"], asked["ignore_eos"], asked["temperature"]) == (5, True, 0.5)


@pytest.mark.slow
@pytest.mark.skipif(DYNAMO is None, reason="WARMROUTE_DYNAMO names no folder with Dynamo")
async def test_dynamo_answers_by_way_of_our_servers(server: TestServer, tmp_path: Path) -> None:
    assert DYNAMO is not None
    peer, port, home = peers.PEERS["dynamo"], peers.free_port(), Path(DYNAMO)
    url = str(server.make_url("")).rstrip("/")
    flags = peer.flags(port, peers.Before((url,), "m", default_model(), tmp_path))
    command = [*(peer.command(home) or []), *flags]
    assert command[0] == sys.executable
    with Child(command, None, tmp_path / "log", peers.environ(home)):

        def named() -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as answer:
                    return bool(json.load(answer)["data"])
            except OSError:
                return False

        until(named, 90, "Dynamo named no model")
        message = {"role": "user", "content": "Hello"}
        body = {"model": "m", "messages": [message], "max_tokens": 9}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer,
        ):
            said = await answer.json()
    assert "choices" in said, said
    assert said["choices"][0]["message"]["content"] == TEXT
