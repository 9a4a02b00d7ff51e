"""Which life of a replica id this is: a number larger than every one before it.

Readers fence whatever carries a smaller one, so a clock that went back must not lower it, and two
processes must not live under one id at the same time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from events.bus import Bus
from events.envelope import unseal
from events.errors import WarmrouteError, WireError
from events.snapshot import SnapshotRequest
from events.subjects import check_id, replica_subject, snapshot_subject, split
from events.wire import encode

LISTEN_S = 0.25


class ReplicaIdTakenError(WarmrouteError):
    """Another live process holds this replica id."""


async def claim_boot(
    bus: Bus,
    cluster: str,
    replica_id: str,
    state_dir: Path,
    *,
    wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    listen_s: float = LISTEN_S,
) -> int:
    """max(wall clock ms, last persisted, highest seen on the bus) + 1, persisted in `state_dir`.

    Asks for the id's snapshot: where nobody serves it, the bus says so at once; a holder that hangs
    costs `listen_s`, and is fenced by our larger boot. Raises ReplicaIdTakenError.
    """
    path = state_dir / f"{check_id(replica_id)}.boot"
    heard = _Heard()
    listening = await bus.subscribe(replica_subject(cluster, replica_id, "*"), heard.receive)
    try:
        answered = await _answers(bus, snapshot_subject(cluster, replica_id), listen_s)
    finally:
        await listening.close()
    if answered or heard.alive:
        raise ReplicaIdTakenError(
            f"replica id '{replica_id}' is in use in cluster '{cluster}': stop the other process, "
            "or give this one another id"
        )
    boot = max(wall_ms(), _read(path), heard.boot) + 1
    _write(path, boot)
    return boot


class _Heard:
    """What the present holder of the id says while we listen; a bye only raises the floor."""

    def __init__(self) -> None:
        self.boot = 0
        self.alive = False

    def receive(self, subject: str, payload: bytes) -> None:
        with contextlib.suppress(WireError, ValueError):
            self.boot = max(self.boot, unseal(payload).boot)
            self.alive = self.alive or split(subject)[2] != "bye"


async def _answers(bus: Bus, subject: str, timeout_s: float) -> bool:
    try:
        await bus.request(subject, encode(SnapshotRequest()), timeout_s)
    except TimeoutError:
        return False
    return True


def _read(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _write(path: Path, boot: int) -> None:
    """Whole or not at all, and on disk before anybody hears of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".boot.new")
    with fresh.open("w") as file:
        file.write(str(boot))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
