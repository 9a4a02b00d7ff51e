"""Where a server says that it publishes: believed for itself and this machine only."""

from __future__ import annotations

import json

import pytest

from configs.schema import BackendConfig
from router.backends.roster import Backend
from tests.fakes.openai_server import ForeignServer
from tools.bridge.discover import UnreachableError, discover, endpoints_of
from tools.bridge.source import Endpoints
from tools.errors import CommandError


def said(endpoint: str, **more: object) -> bytes:
    return json.dumps({"0": {"endpoint": endpoint, "topic": "", "hwm": 1, **more}}).encode()


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("tcp://*:5557", "tcp://gpu1:5557"),
        ("tcp://0.0.0.0:5557", "tcp://gpu1:5557"),
        ("tcp://[::]:5557", "tcp://gpu1:5557"),
        ("tcp://gpu1:5557", "tcp://gpu1:5557"),
        ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
        ("ipc:///run/kv", "ipc:///run/kv"),
    ],
)
def test_addresses(endpoint: str, address: str) -> None:
    awaited = endpoint == "tcp://127.0.0.1:5557"
    assert endpoints_of(said(endpoint), "gpu1") == Endpoints(address, awaited=awaited)


def test_the_replay_socket_is_found_too() -> None:
    body = said("tcp://*:5557", replay_endpoint="tcp://127.0.0.1:5558")
    assert endpoints_of(body, "127.0.0.1").replay == "tcp://127.0.0.1:5558"


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"no",
        b"[" * 10_000,
        said("tcp://evil.example:5557"),
        said("http://gpu1:80"),
        said("tcp://gpu1:port"),
        json.dumps({"0": {"endpoint": "tcp://*:1"}, "1": {"endpoint": "tcp://*:2"}}).encode(),
    ],
)
def test_S3_nothing_else_is_dialled(body: bytes) -> None:
    with pytest.raises(CommandError):
        endpoints_of(body, "gpu1")


async def test_the_server_is_asked() -> None:
    async with ForeignServer() as server:
        config = BackendConfig(id="f0", url=server.url)
        backend = Backend(config, server.url, "up")
        with pytest.raises(CommandError, match="give --events"):
            await discover(backend)
        server.more["/kv_event_sources"] = {"0": {"endpoint": "tcp://*:5557"}}
        assert (await discover(backend)).events == "tcp://127.0.0.1:5557"
    with pytest.raises(UnreachableError):
        await discover(backend)
