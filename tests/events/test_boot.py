"""Claiming a replica id: ever larger, persisted, and one living holder only."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from events.envelope import seal
from events.load import ReplicaBye
from events.memory import MemoryBus
from events.subjects import replica_subject, snapshot_subject
from replica.boot import ReplicaIdTakenError, claim_boot
from replica.publish import Publisher
from tests.events.conftest import Town
from tests.events.helpers import CLUSTER, ListEngine, config, hello


async def claim(bus: MemoryBus, folder: Path, wall_ms: int = 1_000) -> int:
    return await claim_boot(bus, CLUSTER, "r0", folder, wall_ms=lambda: wall_ms, listen_s=0.05)


async def test_boots_grow_even_when_the_clock_goes_back(tmp_path: Path) -> None:
    bus = MemoryBus()
    boots = [await claim(bus, tmp_path / "state", wall) for wall in (1_000, 1_000, 5_000, 10, 10)]
    assert boots == [1_001, 1_002, 5_001, 5_002, 5_003]
    assert (tmp_path / "state" / "r0.boot").read_text() == "5003"


async def test_an_unreadable_state_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "r0.boot").write_text("not a number")
    assert await claim(MemoryBus(), tmp_path) == 1_001


async def test_a_living_holder_keeps_its_id(tmp_path: Path) -> None:
    bus = MemoryBus()
    holder = Publisher(bus, CLUSTER, "r0", hello(), ListEngine(), config(), boot=1)
    await holder.start()
    with pytest.raises(ReplicaIdTakenError, match="'r0' is in use"):
        await claim(MemoryBus(bus.hub), tmp_path)
    await holder.close()
    assert await claim(MemoryBus(bus.hub), tmp_path) == 1_001


async def test_a_heartbeat_heard_meanwhile_is_a_living_holder_too(tmp_path: Path) -> None:
    bus = MemoryBus()
    claiming, subject = await claim_beside_a_hanging_holder(bus, tmp_path)
    await bus.publish(
        replica_subject(CLUSTER, "r0", "load"), seal("r0", 9, 1, 0, ReplicaBye(reason=""))
    )
    with pytest.raises(ReplicaIdTakenError):
        await claiming
    await subject.close()


async def test_a_bye_heard_meanwhile_raises_the_floor(tmp_path: Path) -> None:
    bus = MemoryBus()
    claiming, subject = await claim_beside_a_hanging_holder(bus, tmp_path)
    await bus.publish(
        replica_subject(CLUSTER, "r0", "bye"), seal("r0", 9_999, 1, 0, ReplicaBye(reason=""))
    )
    await bus.publish(replica_subject(CLUSTER, "r0", "bye"), b"\x80nonsense")
    assert await claiming == 10_000
    await subject.close()


async def claim_beside_a_hanging_holder(bus: MemoryBus, folder: Path):
    asked = asyncio.Event()

    async def hang(_payload: bytes) -> bytes:
        asked.set()
        return await asyncio.Event().wait() or b""

    subscription = await bus.serve(snapshot_subject(CLUSTER, "r0"), hang)
    claiming = asyncio.create_task(claim(bus, folder))
    await asked.wait()
    return claiming, subscription


async def test_over_nats_with_a_replicas_own_permissions(town: Town, tmp_path: Path) -> None:
    bus = await town.replica()
    first = await claim_boot(bus, CLUSTER, "r0", tmp_path, listen_s=30.0)
    holder = Publisher(bus, CLUSTER, "r0", hello(), ListEngine(), config(), boot=first)
    await holder.start()
    with pytest.raises(ReplicaIdTakenError):
        await claim_boot(await town.replica(), CLUSTER, "r0", tmp_path / "other", listen_s=30.0)
    await holder.close()
    assert await claim_boot(bus, CLUSTER, "r0", tmp_path) > first
    assert bus.stats.refused == 0
