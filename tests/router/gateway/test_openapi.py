"""The OpenAPI document says what there is, and a fuzzer that reads it finds nothing."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import aiohttp
import pytest

from router.openai.fields import Field
from router.openai.parameters import chat_table, completion_table
from tests.fakes.scripts import echo
from tests.router.gateway.house import ADMIN_KEY, House

UNDOCUMENTED = {"/", "/dashboard/events"}
"""A redirect, and what only the page reads."""

CONFIG = """\
[checks.positive_data_acceptance]
expected-statuses = [200, 400, 401, 403, 404, 409, 413, 429, 503]
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 408, 409, 413, 414, 415, 429, 431]
"""
"""What a schema can't say (two parameters that exclude each other, a prompt that is too long for
the context) is a 400 with a reason."""


def _failures(report: str) -> str:
    return report.partition("= FAILURES =")[2][:20_000]


async def get(house: House, http: aiohttp.ClientSession) -> dict:
    async with http.get(f"{house.url}/openapi.json") as answer:
        assert answer.status == 200
        return await answer.json()


async def test_every_route_is_described(house: House, http: aiohttp.ClientSession) -> None:
    document = await get(house, http)
    described = {
        (method.upper(), path) for path, item in document["paths"].items() for method in item
    }
    routes = {
        (route.method, route.resource.canonical)
        for route in house.gateway.app.router.routes()
        if route.method != "HEAD" and route.resource.canonical not in UNDOCUMENTED
    }
    assert described == routes


@pytest.mark.parametrize(
    ("path", "table"),
    [("/v1/chat/completions", chat_table), ("/v1/completions", completion_table)],
)
async def test_every_parameter_is_described(
    house: House, http: aiohttp.ClientSession, path: str, table
) -> None:
    document = await get(house, http)
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    limits = house.services.limits(house.services.jobs.pool())
    taken = {name for name, entry in table(limits).items() if isinstance(entry, Field)}
    assert set(body["properties"]) == taken


@pytest.mark.slow
async def test_schemathesis_finds_nothing(house: House, tmp_path: Path) -> None:
    house.script(echo)
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", config),
        *("run", f"{house.url}/openapi.json", "--header", f"x-warmroute-admin: {ADMIN_KEY}"),
        *("--checks", "all", "--exclude-checks", "ignored_auth,use_after_free"),
        *("--max-examples", "25", "--seed", "1", "--request-timeout", "20", "--no-color"),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(400):
        output, _ = await child.communicate()
    assert child.returncode == 0, _failures(output.decode())
    await house.settled()
