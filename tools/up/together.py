"""Waiting for several children at once: the first failure ends all, and whoever watches is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import TypeVar

TELL_S = 5.0
"""After which those that are still missing are named, and again after twice as long each time."""
T = TypeVar("T")


async def together(
    waits: Mapping[str, Coroutine[None, None, T]],
    say: Callable[[str], None],
    hint: str,
    tell_s: float = TELL_S,
) -> list[T]:
    """All results by the order of their names; the first failure ends the others. `hint`: what to
    tell beside the names of those that take long."""
    tasks = {name: asyncio.create_task(one) for name, one in waits.items()}
    telling = asyncio.create_task(_tell(tasks, say, hint, tell_s))
    try:
        return await asyncio.gather(*tasks.values())
    finally:
        for task in (*tasks.values(), telling):
            task.cancel()


async def _tell(
    tasks: Mapping[str, asyncio.Task[T]], say: Callable[[str], None], hint: str, tell_s: float
) -> None:
    began_s = time.monotonic()
    while True:
        await asyncio.sleep(tell_s)
        tell_s *= 2
        missing = ", ".join(name for name, task in tasks.items() if not task.done())
        say(f"waiting  {time.monotonic() - began_s:.0f} s for {missing} ({hint})")
