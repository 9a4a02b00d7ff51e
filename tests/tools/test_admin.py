"""The admin client against servers that are no gateway."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tools.admin import AdminClient
from tools.errors import CommandError


@pytest.mark.parametrize(
    "answer",
    [
        lambda: web.Response(text="<html>Not here</html>", status=501),
        lambda: web.json_response(["a", "list"], status=404),
        lambda: web.json_response({"error": "a word"}, status=404),
    ],
    ids=["html", "list", "word"],
)
async def test_another_server_at_the_url_is_said_in_one_line(
    answer: Callable[[], web.Response],
) -> None:
    async def other(request: web.Request) -> web.Response:
        return answer()

    app = web.Application()
    app.router.add_get("/router/policy", other)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        with pytest.raises(CommandError, match="no warmroute gateway"):
            await AdminClient(session, str(server.make_url("")).rstrip("/"), "key").policy()
