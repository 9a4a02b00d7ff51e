"""A peer that serves what is on a shelf."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.peer.server import PeerServer
from tests.kvstore.conformance.peer_child import Held, Shelf
from tests.kvstore.peer.meeting import SECRET


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def server(shelf: Shelf) -> Iterator[PeerServer[Held]]:
    serving = PeerServer(shelf, SECRET)
    serving.start()
    yield serving
    serving.close()
    assert shelf.leased == 0
    assert serving.connections == 0
