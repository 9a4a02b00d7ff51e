"""One daemon for a file's tests; whoever kills it starts its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kvstore.kvd.daemon import Daemon, Nursery


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("kvd") / "kvd.sock") as daemon:
        yield daemon


@pytest.fixture
def nursery(daemon: Daemon) -> Iterator[Nursery]:
    nursery = Nursery(daemon.path)
    yield nursery
    nursery.close()
