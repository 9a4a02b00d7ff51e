"""The link and strangers: what is dialled, whom it believes, frames that make no sense."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from events.output import CacheCleared, CoreDelta, LinkWelcome, StepFrame, Usage
from events.request import LINK_VERSION, Abort
from events.wire import encode
from router.dispatch.address import AllowList
from router.dispatch.introduction import LinkTarget
from router.errors import LinkRefusedError
from tests.fakes import replica as fake_module
from tests.fakes.replica import FakeReplica
from tests.fakes.scripts import echo
from tests.router.gateway.rig import Rig, collect
from tests.waiting import until


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x80\x04\x95\x00.",
        bytes(range(256)),
        encode(LinkWelcome(version=LINK_VERSION, replica="r0", boot=1)),
        encode(Abort(request_id="x", attempt=1)),
        encode(StepFrame(deltas=(CoreDelta("x", 1, 0, "", (2**32,), (), Usage(1, 0, 1)),))),
        encode(StepFrame(deltas=(CoreDelta("x", 1, 0, "", (-1,), (), Usage(1, 0, 1)),))),
        "text",
    ],
)
async def test_S1_hostile_frames_cost_the_link_and_nothing_else(
    rig: Rig, frame: bytes | str
) -> None:
    async def hostile(call):
        send = call.ws.send_str if isinstance(frame, str) else call.ws.send_bytes
        await send(frame)

    rig.replicas[0].script = hostile
    assert await collect(rig.run()) == "one two three"
    assert rig.chooser.statuses == ["transport", "ok"]
    rig.replicas[0].script = echo
    await rig.up()
    assert await collect(rig.run()) == "one two three"


async def test_S1_an_answer_to_an_unknown_command_is_ignored(rig: Rig) -> None:
    async def chatty(call):
        await call.ws.send_bytes(encode(CacheCleared(command_id="nobody's", blocks=1)))
        await call.answer()

    rig.replicas[0].script = chatty
    assert await collect(rig.run()) == "one two three"


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:80/link",
        "file:///etc/passwd",
        "ws://10.0.0.1:80/link",
        "ws://127.0.0.1.example.org:80/link",
        "ws://user@127.0.0.1:80/link",
        "ws://127.0.0.1/link",
        "ws://127.0.0.1:99999/link",
        "ws://[::ffff:10.0.0.1]:80/link",
        "wss://127.0.0.1:80/link",
        "",
    ],
)
def test_S3_addresses_that_are_not_dialled(url: str) -> None:
    with pytest.raises(LinkRefusedError):
        AllowList().check(url)


@pytest.mark.parametrize(
    "url", ["ws://127.0.0.1:80/link", "ws://[::1]:80/link", "ws://localhost:80/link"]
)
def test_S3_loopback_is_dialled(url: str) -> None:
    assert AllowList().check(url) == url


def test_S3_named_hosts_are_dialled() -> None:
    assert AllowList({"replica-a"}).check("ws://replica-a:80/link")


async def test_S3_no_connection_before_the_check(rig: Rig) -> None:
    touched: list[object] = []
    server = await asyncio.start_server(lambda r, w: touched.append(w.close()), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    rig.targets.append(LinkTarget("evil", 1, f"http://127.0.0.1:{port}/link"))
    await until(lambda: rig.links.refused["scheme"] == 1)
    assert not touched
    assert "evil" not in rig.chooser.linked
    server.close()
    await server.wait_closed()


async def test_S3_redirects_are_not_followed(rig: Rig) -> None:
    visited: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        visited.append(request.path)
        raise web.HTTPFound("/elsewhere")

    app = web.Application()
    app.router.add_get("/{tail:.*}", handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    rig.targets.append(LinkTarget("moved", 1, f"ws://127.0.0.1:{port}/link"))
    await until(lambda: getattr(rig.links.get("moved"), "counts", {}).get("redirect", 0) >= 1)
    assert set(visited) == {"/link"}
    await runner.cleanup()


async def test_S1_a_wrong_secret_is_refused(rig: Rig) -> None:
    async with FakeReplica("r9", secret="another") as stranger:
        rig.targets.append(LinkTarget("r9", 1, stranger.url))
        await until(lambda: len(stranger.hellos) >= 1)
        await until(lambda: rig.links.get("r9").counts["refused"] >= 1)
        assert not rig.links.get("r9").up


async def test_S3_another_replica_at_the_address_is_not_taken_for_the_one_that_was_announced(
    rig: Rig,
) -> None:
    async with FakeReplica("r9") as other:
        rig.targets.append(LinkTarget("r8", 1, other.url))
        await until(lambda: len(other.hellos) >= 1)
        await until(lambda: rig.links.get("r8").counts["identity"] >= 1)
        assert not rig.links.get("r8").up
        assert "r8" not in rig.chooser.linked


async def test_a_replica_that_speaks_another_version_of_the_link_is_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_module, "LINK_VERSION", LINK_VERSION + 1)
    async with FakeReplica("r9") as newer:
        rig.targets.append(LinkTarget("r9", 1, newer.url))
        await until(lambda: len(newer.hellos) >= 1)
        await until(lambda: rig.links.get("r9").counts["version"] >= 1)
        assert not rig.links.get("r9").up
