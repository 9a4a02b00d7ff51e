"""A child that is slow to start again, or can't, with real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.errors import CommandError
from tools.up import cluster
from tools.up.child import Child, SlowStartError
from tools.up.cluster import start_patiently

SLOW_AT_FIRST = """
import pathlib, sys, time
tries = pathlib.Path(sys.argv[1])
tries.write_text(tries.read_text() + "x")
print("opening the model", file=sys.stderr, flush=True)
if len(tries.read_text()) < int(sys.argv[2]):
    time.sleep(600)
print("READY http://here", flush=True)
time.sleep(600)
"""
ENDS = """
import sys
sys.exit("router: no such model")
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Child]:
    """`child(script, *args)`."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "tries").write_text("")

    def made(script: str, *args: str) -> Child:
        (tmp_path / "told.py").write_text(script)
        log = tmp_path / "log"
        log.write_bytes(b"")
        return Child("router-0", "told", [str(tmp_path / "tries"), *args], {}, log)

    return made


async def test_one_that_is_too_slow_gets_more_time_until_it_is_ready(
    child: Callable[..., Child],
) -> None:
    said: list[str] = []
    slow = child(SLOW_AT_FIRST, "3")
    await start_patiently(slow, said.append, 1.0, 0.0)
    try:
        assert [line.rpartition("up to ")[2] for line in said][:2] == ["2 s", "4 s"]
        assert all("router-0 was not ready within" in line for line in said)
        assert not any("ended" in line for line in said)
    finally:
        slow.kill()
        await slow.wait()


async def test_one_that_can_t_is_given_up_with_its_own_last_word(
    child: Callable[..., Child],
) -> None:
    said: list[str] = []
    with pytest.raises(CommandError, match=r"given up after 6 tries.*no such model"):
        await start_patiently(child(ENDS), said.append, 60.0, 0.0)
    assert len(said) == cluster.START_TRIES - 1


async def test_who_was_stopped_for_being_slow_says_what_it_was_at(
    child: Callable[..., Child], tmp_path: Path
) -> None:
    never = child(SLOW_AT_FIRST, "9")
    with pytest.raises(SlowStartError, match="not ready within 2 s and was stopped") as slow:
        await never.start(2.0)
    assert str(tmp_path / "log") in str(slow.value)
