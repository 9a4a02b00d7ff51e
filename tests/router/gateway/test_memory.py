"""R9 on a real process: a gateway that serves large bodies, each of them new, and refuses larger
ones."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import aiohttp
import pytest

from configs.model.card import load_card
from tests.fakes.tiny_model import write_tiny_gguf
from tests.router.gateway.house import COMPLETION
from tests.router.gateway.street import Street
from tests.router.gateway.test_restart import Router, running
from tests.waiting import PATIENCE_S

CONTEXT = 16_384
PROMPT_TOKENS = 8_000
ROOM_BLOCKS = 4_096
TOO_LONG_BYTES = 1_000_000
AT_ONCE = 4
SEEN_IN_FULL = 500
"""Requests after which most caches are full; promises go on growing to their bound."""

LATER = 500
MORE_MIB = 12
"""Kept by mistake, the token ids of all that came later alone would be more."""

_numbers = itertools.count(1)
pytestmark = pytest.mark.slow


def new_text(numbers: int) -> str:
    """That begins like no other, each number as long as any."""
    number = next(_numbers)
    return " ".join(f"{100_000 + (number + 7 * word) % 900_000}" for word in range(numbers))


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


async def ask(router: Router, http: aiohttp.ClientSession, prompt: str) -> tuple[int, int]:
    """Status, and the tokens of the prompt that were counted."""
    body = {**COMPLETION, "prompt": prompt}
    async with http.post(f"{router.url}/v1/completions", json=body) as response:
        answer = await response.json()
        return response.status, answer.get("usage", {}).get("prompt_tokens", 0)


async def serve(router: Router, http: aiohttp.ClientSession, requests: int, words: int) -> None:
    left = iter(range(requests))

    async def some() -> None:
        for number in left:
            status, _ = await ask(router, http, new_text(words))
            assert status == 200
            if number % 10 == 0:
                assert (await ask(router, http, "x " * (TOO_LONG_BYTES // 2)))[0] == 400

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))


async def test_R9_large_bodies_leave_nothing_behind(tmp_path: Path) -> None:
    card = load_card(write_tiny_gguf(tmp_path / "tiny.gguf", context=CONTEXT))
    street = Street(card, tmp_path, replicas=2, routers=0)
    async with street:
        for fake in street.fakes.values():
            fake.gives_signs = True  # and says what it has received, which then nobody keeps
        await served(street, tmp_path)


async def served(street: Street, folder: Path) -> None:
    async with (
        running(street, folder) as router,
        aiohttp.ClientSession() as http,
    ):
        for name in street.names:
            street.say(name, total_blocks=ROOM_BLOCKS, free_blocks=ROOM_BLOCKS)
        _, tokens = await ask(router, http, new_text(100))
        words = 100 * PROMPT_TOKENS // tokens
        async with asyncio.timeout(PATIENCE_S):
            # Until its room is told.
            while (await ask(router, http, new_text(words)))[0] != 200:  # noqa: ASYNC110 (a process)
                await asyncio.sleep(0.05)
        await serve(router, http, SEEN_IN_FULL, words)
        before = resident_mib(router.child.pid)
        await serve(router, http, LATER, words)
        after = resident_mib(router.child.pid)
    assert after < before + MORE_MIB, (before, after)
