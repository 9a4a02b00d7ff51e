"""Users of kvd are told what comes and goes, whoever caused it (E6, K6)."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from events.cache import CacheOp
from kvstore.arena.arena import Arena
from kvstore.arena.segment import Segment
from kvstore.arena.tier import ArenaTier
from kvstore.identity import BlockIdentity
from kvstore.known import Known
from kvstore.kvd.client import Kvd, open_tier
from kvstore.kvd.messages import Changes, Follow, frame, reply_of
from tests.kvstore.batches import put, writes_of
from tests.kvstore.blocks import run_of
from tests.kvstore.kvd.daemon import SOON_S, Daemon


class Twin:
    """The set that a reader makes of what a Known tells."""

    def __init__(self, most: int = 10_000) -> None:
        self.known = Known(most)
        self._keys: set[bytes] = set()

    def keys(self) -> set[bytes]:
        for op, key in self.known.drain():
            (self._keys.add if op is CacheOp.STORED else self._keys.remove)(key)
        return self._keys


def keys_of(blocks: Sequence[BlockIdentity]) -> set[bytes]:
    return {block.key for block in blocks}


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_E6_all_know_what_one_wrote_and_what_left_for_it(tmp_path: Path) -> None:
    with (
        Daemon(tmp_path / "kvd.sock", mib=1) as daemon,
        closing(open_tier(daemon.path, "one")) as one,
        closing(open_tier(daemon.path, "other")) as other,
    ):
        first = run_of(3, seed=1)
        put(one, writes_of(first))
        twin = Twin()
        other.follow(twin.known)
        until(lambda: twin.keys() == keys_of(first))
        other.delete([first[2].key])
        until(lambda: twin.keys() == keys_of(first[:2]))
        twin.known.confirm([b"k" * 16])
        twin.known.deny(first[0].key)
        assert twin.keys() == keys_of(first[:2])
        more = run_of(400, seed=2)  # more than it has room for
        put(one, writes_of(more))
        control = Kvd(daemon.path, "test").connect("ask", time.monotonic() + SOON_S)
        there = {*control.keys(b"", 1_024, time.monotonic() + SOON_S)}
        control.close()
        assert 100 < len(there) < 400
        until(lambda: twin.keys() == there)


def test_a_late_comer_hears_of_everything_that_is_there(tmp_path: Path) -> None:
    """In more than one frame."""
    with (
        Daemon(tmp_path / "kvd.sock", mib=8) as daemon,
        closing(open_tier(daemon.path, "one")) as one,
    ):
        blocks = run_of(1_500, seed=3)
        put(one, writes_of(blocks))
        twin = Twin()
        one.follow(twin.known)
        until(lambda: twin.keys() == keys_of(blocks))


def test_K6_of_a_dead_daemon_nothing_is_known_and_of_the_next_one_all(tmp_path: Path) -> None:
    with (
        Daemon(tmp_path / "kvd.sock") as daemon,
        closing(open_tier(daemon.path, "one")) as tier,
    ):
        old, new, twin = run_of(2, seed=4), run_of(3, seed=5), Twin()
        tier.follow(twin.known)
        put(tier, writes_of(old))
        until(lambda: twin.keys() == keys_of(old))
        daemon.stop(signal.SIGKILL)
        until(lambda: not twin.keys())
        daemon.start()
        with closing(open_tier(daemon.path, "other")) as other:
            put(other, writes_of(new))
            until(lambda: twin.keys() == keys_of(new))


def test_an_arena_of_ones_own_tells_as_well() -> None:
    arena, twin, blocks = Arena(Segment.private(1 << 20)), Twin(), run_of(2, seed=6)
    with closing(ArenaTier.local(arena)) as tier:
        put(tier, writes_of(blocks))
        tier.follow(twin.known)
        assert twin.keys() == keys_of(blocks)
        arena.purge(None)
        assert twin.keys() == set()
    session = arena.session("s")
    assert not arena.open(session, [blocks[0].key])
    assert twin.keys() == set()


def test_golden_frames() -> None:
    assert frame(Follow()).hex() == "0800000091a6466f6c6c6f77"
    told = Changes([b"k" * 16], [])
    assert frame(told).hex() == "1d00000093a74368616e67657391c410" + (b"k" * 16).hex() + "90"
    assert reply_of(frame(told)[4:]) == told
