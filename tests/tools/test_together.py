"""Waiting for several starts: those that take long are named, the first failure ends all."""

from __future__ import annotations

import asyncio

import pytest

from tools.errors import CommandError
from tools.up.together import together


async def test_whoever_takes_long_is_named_again_and_again() -> None:
    said: list[str] = []
    told = asyncio.Event()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            told.set()

    async def slow() -> str:
        await told.wait()
        return "late"

    async def quick() -> str:
        return "soon"

    found = await together({"r0": slow(), "r1": quick()}, say, "logs: here", tell_s=0.01)
    assert found == ["late", "soon"]
    assert all(line.endswith("s for r0 (logs: here)") for line in said)


async def test_the_first_failure_ends_the_others() -> None:
    ended = asyncio.Event()

    async def fails() -> str:
        await asyncio.sleep(0)
        raise CommandError("no")

    async def never() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    with pytest.raises(CommandError, match="no"):
        await together({"r0": never(), "r1": fails()}, lambda _: None, "")
    await asyncio.wait_for(ended.wait(), 5)
