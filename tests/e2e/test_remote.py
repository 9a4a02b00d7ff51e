"""`warmroute up --remote`: replicas share blocks through an embedded Valkey, which may die."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest
from openai import OpenAI

from kvstore.remote.endpoint import Endpoint
from kvstore.remote.resp import RespConnection
from kvstore.remote.valkey import PREFIX
from tests.e2e.conftest import MODEL
from tests.e2e.up import Up
from tests.waiting import wait_until

PROMPT = "The quick brown fox jumps over the lazy dog. " * 12


def stored(up: Up) -> int:
    """How many blocks lie in the Valkey, asked with the password that only its file holds."""
    config = (up.state / "valkey" / "valkey.conf").read_text()
    port, password = (
        re.search(rf"^{name} (\S+)$", config, re.M) for name in ("port", "requirepass")
    )
    assert port
    assert password
    endpoint = Endpoint("127.0.0.1", int(port[1]), password=password[1])
    deadline = time.monotonic() + 5
    with closing(RespConnection(endpoint, deadline)) as client:
        return len(client.call(b"KEYS", PREFIX + b"*", deadline=deadline))


def answers(up: Up) -> bool:
    """Whether it can be asked; one that is still starting refuses connections."""
    try:
        return stored(up) >= 0
    except OSError:
        return False


def ask(up: Up) -> str:
    with OpenAI(base_url=f"{up.url}/v1", api_key=up.key, max_retries=0, timeout=60) as client:
        answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0)
        return answer.choices[0].text


def pid_of_valkey(up: Up) -> int:
    return next(
        pid
        for pid in up.children()
        if b"valkey-server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


@pytest.mark.slow
def test_blocks_used_twice_go_to_the_store_and_its_death_costs_nothing(
    tmp_path: Path, tiny_model: Path
) -> None:
    flags = ("--port", "0", "--replicas", "1", "--dtype", "float32", "--remote")
    up = Up(tmp_path / "state", *flags, "--model", str(tiny_model), "--model-name", MODEL)
    try:
        up.wait_ready()
        assert (up.state / "valkey" / "valkey.conf").stat().st_mode & 0o077 == 0
        first = ask(up)
        for _ in range(3):
            assert ask(up) == first
        wait_until(lambda: stored(up) > 0, what="what was used twice is in the store")
        os.kill(pid_of_valkey(up), signal.SIGKILL)
        assert ask(up) == first
        wait_until(lambda: "Valkey ended: starting it again" in up.output, what="it is missed")
        assert ask(up) == first
        wait_until(lambda: answers(up), what="it answers again, with the same password")
        logs = up.logs() + up.output
        password = re.search(
            r"requirepass (\S+)", (up.state / "valkey" / "valkey.conf").read_text()
        )
        assert password
        assert password[1] not in logs
    finally:
        up.close()
