"""The KV memory that `warmroute up` starts, as an operator sees it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.conftest import MODEL
from tests.e2e.up import Up
from tools.cli import main

SOON_S = 30.0


def kv(up: Up, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    status = main(["kv", *words, "--state", str(up.state), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_what_replicas_computed_lies_in_the_shared_memory_and_is_right(
    up: Up, client: OpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    before = kv(up, capsys, "stats")[1]["stored"]
    prompt = "every block of this prompt is kept " * 20
    client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    deadline = time.monotonic() + SOON_S
    while (stats := kv(up, capsys, "stats")[1])["stored"] <= before:
        assert time.monotonic() < deadline
    assert stats["sessions"] > 1
    status, found = kv(up, capsys, "verify")
    assert (status, found["wrong"]) == (0, {})
    assert found["right"] > 0
    assert kv(up, capsys, "inspect", "--limit", "1")[1][0]["tokens"] == 16
