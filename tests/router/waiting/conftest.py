"""These tests run on a loop whose clock jumps to whatever comes next: hours cost nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.router.waiting.virtual import VirtualLoop


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable]:
    """The loop of this folder."""
    return {"virtual": VirtualLoop}
