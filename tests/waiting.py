"""Waits for what is sure to come. Only a failure takes as long as the patience, so it is long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 60.0


async def until(
    condition: Callable[[], object], timeout_s: float = PATIENCE_S, what: str = "it"
) -> None:
    """Let the loop run until the condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come about"
        await asyncio.sleep(0.005)


def wait_until(
    condition: Callable[[], object], timeout_s: float = PATIENCE_S, what: str = "it"
) -> None:
    """Until another thread or process has come so far."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come about"
        time.sleep(0.02)
