"""The daemon itself ends, in every way, and starts again (K6)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.arena.tier import ArenaTier
from kvstore.kvd.client import open_tier
from kvstore.kvd.place import Place
from kvstore.tier import Status
from tests.kvstore.batches import get, put, writes_of
from tests.kvstore.blocks import LAYOUT, run_of
from tests.kvstore.kvd.daemon import SOON_S, Daemon


def again(tier: ArenaTier, seed: int) -> list[Status]:
    """Put until the daemon is found again."""
    deadline = time.monotonic() + SOON_S
    while True:
        statuses = put(tier, writes_of(run_of(2, seed=seed)))
        if Status.FAILED not in statuses:
            return statuses
        assert time.monotonic() < deadline


def killed_and_restarted(path: Path, times: int) -> None:
    daemon = Daemon(path)
    daemon.start()
    tier, boots = open_tier(path, "user"), [daemon.report().boot]
    blocks = run_of(2, seed=3)
    keys = [block.key for block in blocks]
    assert again(tier, 3) == [Status.STORED] * 2
    for _ in range(times):
        daemon.stop(signal.SIGKILL)
        assert path.exists()
        assert {outcome.status for outcome in get(tier, keys)[0]} == {Status.FAILED}
        daemon.start()
        boots.append(daemon.report().boot)
        # What the last one held is gone; nothing is found that was not written to this one.
        assert daemon.report().stats.blocks == 0
        assert again(tier, 3) == [Status.STORED] * 2
        outcomes, payloads, _ = get(tier, keys)
        while outcomes[0].status is Status.FAILED:
            outcomes, payloads, _ = get(tier, keys)
        assert payloads == [bytes(write.payload) for write in writes_of(blocks)]
    assert boots == sorted({*boots})
    tier.close()
    daemon.wait_idle(SOON_S)
    assert daemon.stop() == 0
    assert not path.exists()


def test_K6_a_restarted_daemon_knows_nothing_and_its_users_come_back(tmp_path: Path) -> None:
    killed_and_restarted(tmp_path / "kvd.sock", 1)


@pytest.mark.slow
def test_K6_twenty_kills_of_the_daemon(tmp_path: Path) -> None:
    killed_and_restarted(tmp_path / "kvd.sock", 20)


def test_one_daemon_to_a_path_even_to_a_long_one(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    with Daemon(folder / "kvd.sock") as daemon:
        assert os.stat(daemon.path).st_mode & 0o777 == 0o600
        tier = open_tier(daemon.path, "user")
        assert again(tier, 4) == [Status.STORED] * 2
        second = subprocess.run(
            [sys.executable, "-m", "kvstore.kvd", "--socket", daemon.path, "--bytes", "4096"],
            capture_output=True,
            text=True,
            timeout=SOON_S,
        )
        assert second.returncode == 1
        assert second.stderr == f"kvd: another kvd holds {daemon.path}\n"
        assert get(tier, [run_of(1, seed=4)[0].key])[0][0].status is Status.HIT
        tier.close()


def test_K8_the_boot_grows_though_the_wall_clock_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boots = []
    for hours in (0, -1, 1, -2):
        now_ns = 1_700_000_000 * 10**9 + hours * 3_600 * 10**9
        monkeypatch.setattr(time, "time_ns", lambda now_ns=now_ns: now_ns)
        place = Place(tmp_path / "kvd.sock")
        boots.append(place.boot)
        place.leave()
        place.leave()
    assert boots == sorted({*boots})


def test_a_daemon_without_memory_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstore.kvd", "--socket", str(tmp_path / "s")]
    ended = subprocess.run(
        [*command, "--bytes", str(1 << 50)], capture_output=True, text=True, timeout=SOON_S
    )
    assert ended.returncode == 1
    assert "are available" in ended.stderr
    assert LAYOUT.payload_bytes < 4_096
