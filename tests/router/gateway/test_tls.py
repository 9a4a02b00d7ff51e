"""TLS: clients over HTTPS, and links on which both sides show certificates."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from configs.load import ConfigError
from configs.schema import TlsConfig
from events.secrets import link_secret
from events.tls import check_mutual, client_context, server_context
from router.dispatch.address import AllowList
from router.dispatch.introduction import LinkTarget, RouterIdentity
from router.dispatch.links import Links
from tests.fakes.papers import make_papers
from tests.router.gateway.house import CHAT, SECRET
from tests.waiting import until

BOOT = 7


@pytest.fixture
def papers(tmp_path: Path) -> TlsConfig:
    return make_papers(tmp_path / "ours")


@pytest.fixture
async def doors(papers: TlsConfig) -> AsyncIterator[tuple[str, list[web.Request]]]:
    """A server that asks for certificates, as a replica's door does, and who came in."""
    came: list[web.Request] = []

    async def handle(request: web.Request) -> web.Response:
        came.append(request)
        return web.Response(status=503)

    app = web.Application()
    app.router.add_get("/link", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    door = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, door, ssl_context=server_context(papers)).start()
    port = door.getsockname()[1]
    yield f"wss://127.0.0.1:{port}/link", came
    await runner.cleanup()


async def dial(url: str, tls: ssl.SSLContext) -> str:
    """What the link says of its first failed attempt."""
    identity = RouterIdentity("router-0", "router-0-1", link_secret(bytes.fromhex(SECRET)))
    target = LinkTarget("r0", BOOT, url)
    links = Links(lambda: [target], AllowList(tls=True), identity, lambda *_: None, tls)
    await links.start()
    try:
        await until(lambda: (link := links.get("r0")) is not None and bool(link.counts))
        return next(iter(links.get("r0").counts))
    finally:
        await links.close()


async def test_a_router_with_a_certificate_of_the_authority_comes_in(papers, doors) -> None:
    url, came = doors
    await dial(url, client_context(papers))
    assert came


async def test_s3_strangers_stay_outside(papers, doors, tmp_path: Path) -> None:
    url, came = doors
    strangers = make_papers(tmp_path / "strangers")
    without = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    without.load_verify_locations(papers.ca)
    forged = client_context(TlsConfig(cert=strangers.cert, key=strangers.key, ca=papers.ca))
    for context in (without, forged, client_context(strangers)):
        assert await dial(url, context) in ("unreachable", "lost")
    assert not came


def test_s3_with_tls_a_plain_link_is_not_dialled() -> None:
    with pytest.raises(Exception, match="wss"):
        AllowList(tls=True).check("ws://127.0.0.1:1/link")
    assert AllowList(tls=True).check("wss://127.0.0.1:1/link")


def test_a_link_without_an_authority_is_refused(papers: TlsConfig) -> None:
    check_mutual(papers)
    with pytest.raises(ConfigError, match="'ca'"):
        check_mutual(TlsConfig(cert=papers.cert, key=papers.key))


@pytest.mark.parametrize("missing", ["cert", "key", "ca"])
def test_files_that_are_not_there_are_named(papers: TlsConfig, missing: str) -> None:
    files = {"cert": papers.cert, "key": papers.key, "ca": papers.ca}
    with pytest.raises(ConfigError, match="nowhere"):
        server_context(TlsConfig(**files | {missing: "nowhere.pem"}))


async def test_clients_speak_https(build, papers: TlsConfig) -> None:
    served = TlsConfig(cert=papers.cert, key=papers.key)
    house = await build(tls=served)
    trust = ssl.create_default_context(cafile=papers.ca)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as https:
        assert house.url.startswith("https://127.0.0.1:")
        async with house.post(https, "/v1/chat/completions", CHAT) as answer:
            assert answer.status == 200
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(house.url).port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"200" not in await reader.read(100)
    writer.close()
