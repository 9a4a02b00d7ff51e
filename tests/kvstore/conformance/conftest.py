"""One store of each kind for all tests of a module, and a tier of its own for each test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from kvstore.tier import Tier
from tests.kvstore.conformance.backend import Backend
from tests.kvstore.conformance.backends import BACKENDS

SEEDS = itertools.count(1_000)


@pytest.fixture(scope="module")
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Backend]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        made = BACKENDS[request.param](tmp_path_factory.mktemp(request.param))
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def tier(backend: Backend) -> Iterator[Tier]:
    opened = backend.open()
    yield opened
    backend.release(opened)


@pytest.fixture
def seed() -> Callable[[], int]:
    """A chain that no other test has."""
    return lambda: next(SEEDS)
