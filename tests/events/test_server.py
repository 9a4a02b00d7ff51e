"""The embedded server: who may say what, and how it starts, fails, stops and dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from events.errors import BusError
from events.nats import connect
from events.server import EmbeddedNats
from events.subjects import replica_subject, roll_call_subject, router_subject, snapshot_subject
from tests.events.conftest import Town
from tests.events.helpers import CLUSTER
from tests.waiting import until


async def test_each_role_publishes_only_under_its_own_subjects(town: Town) -> None:
    router, watcher = await town.router(), await town.router()
    got: list[str] = []
    for pattern in (
        replica_subject(CLUSTER, "*", "*"),
        snapshot_subject(CLUSTER, "*"),
        roll_call_subject(CLUSTER),
        router_subject(CLUSTER, "*", "*"),
    ):
        await watcher.subscribe(pattern, lambda subject, _: got.append(subject))
    own, foreign = replica_subject(CLUSTER, "r0", "load"), replica_subject(CLUSTER, "r1", "load")
    decision = router_subject(CLUSTER, "router-0", "decision")
    replica, viewer = await town.replica("r0"), await town.viewer()
    for bus in (viewer, router, replica):
        for subject in (foreign, own, decision, roll_call_subject(CLUSTER), "elsewhere"):
            await bus.publish(subject, b"x")
    await until(lambda: len(got) >= 3)
    assert sorted(got) == sorted([decision, roll_call_subject(CLUSTER), own])
    await until(lambda: (viewer.stats.refused, replica.stats.refused) == (5, 4))


async def test_S3_a_router_speaks_for_itself_alone_and_a_replica_for_no_router(
    town: Town,
) -> None:
    first, second, replica = (
        await town.router(),
        await town.router("router-1"),
        await town.replica(),
    )
    got: list[bytes] = []
    peers = router_subject(CLUSTER, "router-0", "peers")
    await second.subscribe(
        router_subject(CLUSTER, "*", "peers"), lambda _, payload: got.append(payload)
    )
    await second.publish(peers, b"forged by a router")
    await replica.publish(peers, b"forged by a replica")
    await until(lambda: (second.stats.refused, replica.stats.refused) == (1, 1))
    await first.publish(peers, b"mine")
    await until(lambda: got)
    assert got == [b"mine"]


async def test_a_replica_reads_neither_others_nor_their_inboxes(town: Town) -> None:
    replica, router, other = await town.replica("r0"), await town.router(), await town.replica("r1")
    overheard: list[str] = []
    for subject in (
        replica_subject(CLUSTER, "r1", "load"),
        "_INBOX.>",
        "_INBOX.router-router-0.>",
        ">",
        snapshot_subject(CLUSTER, "r1"),
    ):
        await replica.subscribe(subject, lambda subject, _: overheard.append(subject))

    async def respond(payload: bytes) -> bytes:
        return payload

    await other.serve(snapshot_subject(CLUSTER, "r1"), respond)
    await other.publish(replica_subject(CLUSTER, "r1", "load"), b"x")
    assert await router.request(snapshot_subject(CLUSTER, "r1"), b"q", 2.0) == b"q"
    await until(lambda: replica.stats.refused == 5)
    assert overheard == []


async def test_a_replica_cannot_forge_a_reply(town: Town) -> None:
    replica, router = await town.replica("r0"), await town.router()
    got: list[str] = []
    await router.subscribe("_INBOX.router-router-0.*", lambda subject, _: got.append(subject))
    await replica.publish("_INBOX.router-router-0.x", b"forged")
    await until(lambda: replica.stats.refused == 1)
    assert got == []


async def test_the_wrong_password_is_refused_at_once(town: Town) -> None:
    for user, password in (("replica-r0", "wrong"), ("", ""), ("nobody", "x")):
        with pytest.raises(BusError, match="refuses the credentials"):
            await connect(town.server.url, user, password, "x", timeout_s=30.0)


async def test_nobody_there_is_a_clear_error() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"nats://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(BusError, match=url):
            await connect(url, timeout_s=0.2)


async def test_secrets_lie_in_a_private_file_and_listen_on_loopback(
    town: Town, tmp_path: Path
) -> None:
    config = tmp_path / "nats-server.json"
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert '"host": "127.0.0.1"' in config.read_text()
    passwords = {town.server.replica("r0").password, town.server.router().password}
    assert len(passwords) == 2
    assert all(password not in log for password in passwords for log in [_log(tmp_path)])


def _log(folder: Path) -> str:
    return (folder / "nats-server.log").read_text()


async def test_a_taken_port_is_a_clear_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = EmbeddedNats(tmp_path, CLUSTER, ("r0",), port=port)
        with pytest.raises(BusError, match=f"port {port} is in use"):
            await server.start()
        assert not server.running
        assert not await server.healthy()


async def test_start_stop_start_keeps_port_and_credentials(tmp_path: Path) -> None:
    server = EmbeddedNats(tmp_path, CLUSTER, ("r0",))
    await server.start()
    before = server.replica("r0")
    await server.start()
    await server.stop()
    await server.stop()
    assert not server.running
    await server.start()
    assert server.replica("r0") == before
    assert await server.healthy()
    await server.stop()


async def test_it_starts_over_what_a_killed_one_left(tmp_path: Path) -> None:
    first = EmbeddedNats(tmp_path, CLUSTER, ("r0",))
    await first.start()
    assert first.pid
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: not first.running)
    second = EmbeddedNats(tmp_path, CLUSTER, ("r0",), port=first.port)
    await second.start()
    assert await second.healthy()
    await second.stop()


async def test_a_cancelled_start_leaves_no_child(tmp_path: Path) -> None:
    server = EmbeddedNats(tmp_path, CLUSTER, ("r0",))
    starting = asyncio.create_task(server.start())
    await until(lambda: server.pid)
    pid = server.pid
    assert pid
    starting.cancel()
    await asyncio.wait({starting})
    assert not server.running
    assert not _alive(pid)


CHILD = """
import asyncio, sys
from pathlib import Path
from events.server import EmbeddedNats
async def main():
    server = EmbeddedNats(Path(sys.argv[1]), "local", ("r0",))
    await server.start()
    print(server.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_it_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CHILD, str(tmp_path)), stdout=subprocess.PIPE
    )
    assert parent.stdout
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 20))
    parent.kill()
    await parent.wait()
    await until(lambda: not _alive(pid), what="the death of the server")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("bad", ["a.b", "", "*", "x" * 65, "a b"])
def test_ids_that_are_no_subject_token(tmp_path: Path, bad: str) -> None:
    with pytest.raises(ValueError):
        EmbeddedNats(tmp_path, CLUSTER, (bad,))
