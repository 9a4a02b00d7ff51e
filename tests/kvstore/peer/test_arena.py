"""Peers pull straight out of an arena's memory while its own users write and evict there (K5)."""

from __future__ import annotations

import threading
import time
from contextlib import closing

from kvstore.arena.arena import Arena
from kvstore.arena.limits import ArenaLimits
from kvstore.arena.segment import Segment
from kvstore.arena.source import ArenaSource
from kvstore.arena.tier import ArenaTier
from kvstore.peer.client import PeerAddress, peer_tier
from kvstore.peer.server import PeerServer
from tests.kvstore.conformance.blocks import LARGE, chain_of, reads_into, verdict

SECRET = bytes(range(32))
MIB = 1024 * 1024


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def test_K5_what_is_pulled_is_never_evicted_under_the_reader() -> None:
    arena = Arena(Segment.private(32 * MIB), ArenaLimits())
    chain = chain_of(8, 1, kv=LARGE)
    server = PeerServer(ArenaSource(arena, "peers"), SECRET)
    server.start()
    stop, seen = threading.Event(), set[str]()

    def churn(own: ArenaTier) -> None:
        while not stop.is_set():
            own.delete([block.key for block in chain[3:]])
            own.put([block.write() for block in chain], soon()).result(20)

    with (
        closing(ArenaTier.local(arena)) as own,
        closing(peer_tier(PeerAddress("127.0.0.1", server.port), SECRET)) as peers,
    ):
        own.put([block.write() for block in chain], soon()).result(20)
        churner = threading.Thread(target=churn, args=(own,))
        churner.start()
        try:
            for _ in range(15):
                rooms = [block.room() for block in chain]
                outcomes = peers.get(reads_into(chain, rooms), soon()).result(20)
                seen |= {verdict(*each) for each in zip(chain, outcomes, rooms, strict=True)}
        finally:
            stop.set()
            churner.join()
    server.close()
    assert "good" in seen
    assert seen <= {"good", "miss"}
    assert arena.stats().leased == 0
