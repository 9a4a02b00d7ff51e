"""O8 in the places that are not a request: what operators write and other servers say comes back
to nobody else, is logged nowhere, and neither crosses the bus nor lies in its store."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import aiohttp
import pytest

from configs.model.card import ModelCard
from tests.fakes.openai_server import Asked
from tests.router.backends.house import ForeignHouse
from tests.router.gateway.house import ADMIN_KEY, CHAT, COMPLETION, KEYS, House
from tests.waiting import until

CANARY = "canary-9c41"
HEAD = f"{CANARY} is what only its owner may read. " * 8
MESSAGES = [{"role": "user", "content": HEAD}]
SHOWN = (
    "/metrics",
    "/dashboard",
    "/openapi.json",
    "/ready",
    "/router/alarms",
    "/router/decisions",
    "/router/hot",
    "/router/peers",
    "/router/policy",
    "/router/public-prefixes",
    "/router/replicas",
    "/router/revisions",
    "/router/scale",
    "/router/shadow",
    "/router/tenants",
    "/router/trust",
)
WRITTEN: list[tuple[str, str, dict[str, Any], int]] = [
    ("PUT", "/router/tenants/carol", {"key": f"sk-{CANARY}"}, 200),
    ("PUT", "/router/tenants/carol", {"add_key": f"sk-2-{CANARY}"}, 200),
    ("PUT", "/router/tenants/carol", {"remove_key": f"sk-2-{CANARY}"}, 200),
    ("PUT", "/router/tenants/carol", {"key": f"sk-{CANARY}" * 99}, 400),
    ("PUT", "/router/tenants/carol", {"scope": CANARY}, 400),
    ("PUT", "/router/tenants/carol", {"degrade": [CANARY]}, 400),
    ("PUT", "/router/tenants/carol", {"weight": CANARY}, 400),
    ("POST", "/router/public-prefixes", {"prompt": HEAD}, 200),
    ("POST", "/router/public-prefixes", {"messages": MESSAGES}, 200),
    ("POST", "/router/public-prefixes", {"messages": [{"role": CANARY, "content": "x"}]}, 400),
    ("POST", "/router/warm", {"prompt": HEAD}, 200),
    ("POST", "/router/warm", {"prompt": HEAD, "tenant": CANARY}, 404),
    ("POST", "/router/explain", {**CHAT, "messages": MESSAGES}, 200),
    ("POST", "/router/explain", {**COMPLETION, "prompt": {"x": CANARY}}, 400),
    ("PUT", "/router/policy", {"policy": CANARY}, 400),
    ("PUT", "/router/shadow", {"policy": CANARY}, 400),
    ("PUT", "/router/revisions", {"revision": CANARY}, 400),
    ("POST", "/router/cache/clear", {"limit_blocks": CANARY}, 400),
]


class Ears:
    """All that one router says on the bus."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    async def listen(self, house: House) -> None:
        await house.bus.subscribe("*.*.*.*.*.*", lambda _, payload: self.heard.append(payload))

    def everything(self, house: House) -> bytes:
        """With what its store keeps."""
        buckets = house.bus.hub.buckets.values()
        kept = [entry.value or b"" for bucket in buckets for entry in bucket.values()]
        names = [entry.key.encode() for bucket in buckets for entry in bucket.values()]
        assert self.heard
        return b"\n".join([*self.heard, *kept, *names])


async def told(house: House, http: aiohttp.ClientSession) -> str:
    """Whatever can be looked at, with the admin's eyes."""
    seen = []
    for path in SHOWN:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        async with http.get(house.url + path, headers=headers) as response:
            assert response.status == 200, path
            seen.append(await response.text())
    return "\n".join(seen)


async def test_O8_what_operators_write_is_told_nowhere(
    house: House, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    ears = Ears()
    await ears.listen(house)
    for method, path, body, status in WRITTEN:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}", "x-request-id": "fine"}
        async with http.request(method, house.url + path, json=body, headers=headers) as response:
            answer = await response.text()
            assert response.status == status, (path, body, answer)
            assert CANARY not in answer, (path, body, answer)
    async with house.post(http, "/v1/completions", {**COMPLETION, "prompt": HEAD}) as response:
        assert response.status == 200
    await until(lambda: len(ears.heard) >= 4)
    said = ears.everything(house)
    prompts = [call.request.prompt[:32] for call in house.calls]
    hashes = [hashlib.sha256(f"sk-{CANARY}".encode()), hashlib.sha256(KEYS["alice"].encode())]
    secrets = [CANARY.encode(), *prompts, *(of.hexdigest().encode() for of in hashes)]
    assert prompts
    assert not [secret for secret in secrets if secret in said]
    assert CANARY not in await told(house, http)
    assert CANARY not in caplog.text


@pytest.mark.parametrize("status", [400, 500, 200])
async def test_O8_what_another_server_says_is_for_its_client_alone(
    tiny_card: ModelCard,
    http: aiohttp.ClientSession,
    caplog: pytest.LogCaptureFixture,
    status: int,
) -> None:
    """Servers of other kinds quote prompts in their errors and answers."""

    async def quote(asked: Asked) -> None:
        if status == 200:
            await asked.head()
            await asked.chunk(b'data: {"text": "' + CANARY.encode() + b'"}\n\n')
            asked.cut()
        else:
            error = {"message": f"bad: {CANARY}", "type": CANARY, "code": CANARY}
            await asked.plain(status, {"error": error})

    caplog.set_level(logging.DEBUG)
    async with ForeignHouse(tiny_card, 1) as house:
        ears = Ears()
        await ears.listen(house)
        house.tell(quote)
        body = {**CHAT, "messages": MESSAGES, "stream": status == 200}
        async with house.post(http, "/v1/chat/completions", body) as response:
            assert response.status == {500: 502}.get(status, status)
            answer = b""
            try:
                async for part in response.content.iter_any():
                    answer += part
            except aiohttp.ClientPayloadError:
                assert status == 200
        assert (CANARY.encode() in answer) is (status != 500)
        await until(lambda: len(ears.heard) >= 2)
        assert CANARY.encode() not in ears.everything(house)
        assert CANARY not in await told(house, http)
        assert CANARY not in caplog.text
        await house.settled()
