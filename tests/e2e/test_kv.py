"""The KV memory that `warmroute up` starts, as an operator sees it."""

from __future__ import annotations

import json
import os
import signal
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.conftest import MODEL
from tests.e2e.up import Up, descendants
from tests.waiting import wait_until
from tools.cli import main

SOON_S = 60.0


def kv(up: Up, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    status = main(["kv", *words, "--state", str(up.state), "--json"])
    return status, json.loads(capsys.readouterr().out)


def kept(up: Up, client: OpenAI, capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    """Asks something new, until some of it has been stored; the figures then."""
    before = kv(up, capsys, "stats")[1]["stored"]
    deadline = time.monotonic() + SOON_S
    for turn in count():
        client.completions.create(model=MODEL, prompt=f"{turn} {words * 20}", max_tokens=1)
        stats = kv(up, capsys, "stats")[1]
        if stats["stored"] > before:
            return dict(stats)
        assert time.monotonic() < deadline
    raise AssertionError


def test_what_replicas_computed_lies_in_the_shared_memory_and_is_right(
    up: Up, client: OpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kept(up, client, capsys, "every block of this prompt is kept ")["sessions"] > 1
    status, found = kv(up, capsys, "verify")
    assert (status, found["wrong"]) == (0, {})
    assert found["right"] > 0
    assert kv(up, capsys, "inspect", "--limit", "1")[1][0]["tokens"] == 16


def test_K6_a_kvd_that_dies_costs_no_request_and_comes_back(
    up: Up, client: OpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    (pid,) = (
        pid
        for pid in descendants(up.process.pid)
        if b"kvstore.kvd" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    )
    os.kill(pid, signal.SIGKILL)
    assert client.completions.create(model=MODEL, prompt="still here", max_tokens=1).choices
    wait_until(lambda: "kvd is back" in up.output, what="kvd is started again")
    assert kept(up, client, capsys, "it is kept again after that ")["blocks"] > 0
