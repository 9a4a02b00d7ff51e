"""The servers that are compared, and what is written down of them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import aiohttp

from router.backends.roster import base_url
from tools.errors import CommandError

FIELDS = ("key", "model", "replicas")
ASK_S = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    """`url` without /v1. `replicas` stand behind it. `about` says what it is, without any key."""

    name: str
    url: str
    key: str = ""
    model: str = ""
    replicas: int = 1
    about: str = ""


def target(text: str) -> Target:
    """From `name=URL[,key=...][,model=...][,replicas=N]`. Raises ArgumentTypeError."""
    head, *rest = text.split(",")
    name, _, url = head.partition("=")
    given = dict(part.partition("=")[::2] for part in rest)
    if unknown := [field for field in given if field not in FIELDS]:
        raise argparse.ArgumentTypeError(f"unknown '{unknown[0]}'; known: {', '.join(FIELDS)}")
    replicas = given.get("replicas", "1")
    if not name or not replicas.isdecimal() or not int(replicas):
        raise argparse.ArgumentTypeError("takes name=URL[,key=...][,model=...][,replicas=N]")
    try:
        plain = base_url(url.removesuffix("/").removesuffix("/v1"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Target(
        name, plain, given.get("key", ""), given.get("model", ""), int(replicas), f"{plain} (given)"
    )


async def first_model(of: Target) -> str:
    """The first model that the server names. Raises CommandError."""
    headers = {"Authorization": f"Bearer {of.key}"} if of.key else {}
    timeout = aiohttp.ClientTimeout(ASK_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{of.url}/v1/models", headers=headers) as answer,
        ):
            answer.raise_for_status()
            return str((await answer.json(content_type=None))["data"][0]["id"])
    except (
        aiohttp.ClientError,
        OSError,
        TimeoutError,
        ValueError,
        LookupError,
        TypeError,
    ) as error:
        raise CommandError(
            f"{of.name}: {of.url}/v1/models names no model ({type(error).__name__}): "
            "say which with model="
        ) from error
