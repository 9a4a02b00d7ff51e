"""One tier in use: checked, measured, left alone when it gives wrong blocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from events.cache import CacheOp
from kvstore.errors import Reason
from kvstore.identity import BlockIdentity
from kvstore.level import DISTRUST_AFTER, FORGET_S, QUARANTINE_S, Level, Speed
from kvstore.remote.file import file_tier
from kvstore.tier import Health
from kvstore.verify import Verifier, wall_ms
from tests.fakes.memory_tier import MemoryTier
from tests.kvstore.blocks import BOOT, CLUSTER_KEY, LAYOUT, payload_of, run_of

FAR = 1e9
MAC_KEY = b"m" * 32


class Foreign(MemoryTier):
    """As if others could write it too."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        caps = self.caps
        self.caps = type(caps)("foreign", caps.max_value_bytes, False, True)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Away(MemoryTier):
    """A store that can be left alone, as one that keeps failing is."""

    away = False

    def health(self) -> Health:
        return Health.OPEN if self.away else super().health()


def level_of(tier: MemoryTier, mac_key: bytes = MAC_KEY, clock: Clock | None = None) -> Level:
    return Level(tier, LAYOUT, Verifier(CLUSTER_KEY, LAYOUT), mac_key, clock=clock or Clock())


def written(level: Level, blocks: Sequence[BlockIdentity]) -> list[bytearray]:
    payloads = [payload_of(block.index) for block in blocks]
    level.write(blocks, [memoryview(payload) for payload in payloads], BOOT, FAR)
    return payloads


def read(level: Level, blocks: Sequence[BlockIdentity]) -> tuple[int, list[bytearray]]:
    into = [bytearray(LAYOUT.payload_bytes) for _ in blocks]
    return level.read(blocks, [memoryview(buffer) for buffer in into], FAR), into


def keys_of(blocks: Sequence[BlockIdentity]) -> list[bytes]:
    return [block.key for block in blocks]


def test_what_was_written_is_read_and_counted() -> None:
    level, blocks = level_of(MemoryTier(1 << 20)), run_of(3)
    payloads = written(level, blocks)
    assert level.holds(keys_of(blocks), 0, FAR) == 3
    assert level.holds(keys_of(blocks), 2, FAR) == 1
    assert read(level, blocks) == (3, payloads)
    counts = level.counts
    assert (counts.stored, counts.hits, counts.wasted) == (3, 3, 0)
    assert counts.read_bytes == counts.stored_bytes == 3 * LAYOUT.payload_bytes
    written(level, blocks)
    assert counts.present == 3


def test_E8_of_a_store_that_was_away_nothing_is_known_until_it_is_asked() -> None:
    tier, blocks = Away(1 << 20), run_of(3)
    level = Level(tier, LAYOUT, Verifier(CLUSTER_KEY, LAYOUT), MAC_KEY, max_known=9)
    written(level, blocks)
    assert [fact.op for fact in level.facts()] == [CacheOp.STORED] * 3
    tier.away = True
    assert [fact.op for fact in level.facts()] == [CacheOp.REMOVED] * 3
    tier.away = False
    assert level.facts() == []
    assert level.holds(keys_of(blocks), 0, FAR) == 3
    assert [fact.op for fact in level.facts()] == [CacheOp.STORED] * 3


def test_what_is_behind_a_hole_is_found_but_not_read_through_it() -> None:
    tier = MemoryTier(1 << 20)
    level, blocks = level_of(tier), run_of(4)
    written(level, blocks)
    tier.delete([blocks[1].key])
    keys = keys_of(blocks)
    assert [level.holds(keys, first, FAR) for first in range(4)] == [1, 0, 2, 1]
    assert read(level, blocks)[0] == 1
    assert level.counts.wasted == 2


def test_S1_a_foreign_tier_needs_our_signature_and_a_host_s_own_does_not() -> None:
    for tier, came in ((Foreign(), 0), (MemoryTier(1 << 20), 2)):
        blocks = run_of(2)
        written(level_of(tier, mac_key=b"x" * 32), blocks)
        level = level_of(tier)
        assert read(level, blocks)[0] == came
        assert level.counts.refused == ({} if came else {Reason.MAC: 1})
    level = level_of(Foreign())
    written(level, blocks)
    assert read(level, blocks)[0] == 2


def test_a_wrong_block_is_deleted_and_rests_for_a_while() -> None:
    tier, clock = MemoryTier(1 << 20), Clock()
    level, blocks = level_of(tier, clock=clock), run_of(3)
    written(level, blocks)
    level.refuse(blocks[1].key, Reason.PAYLOAD)
    assert tier.exists_prefix([blocks[1].key], FAR) == 0
    written(level, blocks[1:2])
    keys = keys_of(blocks)
    assert level.holds(keys, 0, FAR) == 1
    assert level.holds(keys, 2, FAR) == 0
    clock.now += QUARANTINE_S
    assert level.holds(keys, 0, FAR) == 3


def test_many_wrong_blocks_shut_the_tier_out_for_a_while() -> None:
    clock = Clock()
    level, blocks = level_of(MemoryTier(1 << 20), clock=clock), run_of(2)
    written(level, blocks)
    for number in range(DISTRUST_AFTER):
        assert level.usable
        level.refuse(number.to_bytes(16, "little"), Reason.KEY)
    assert not level.usable
    assert level.holds(keys_of(blocks), 0, FAR) == 0
    clock.now += QUARANTINE_S
    assert level.usable
    assert level.holds(keys_of(blocks), 0, FAR) == 2


def test_a_chain_that_is_asked_for_lives_on_behind_the_end_of_its_first_time(
    tmp_path: Path,
) -> None:
    """The store renews it; no end in its header stands against that."""
    later_s, blocks = [0.0], run_of(3)
    verifier = Verifier(CLUSTER_KEY, LAYOUT, lambda: wall_ms() + int(1_000 * later_s[0]))
    clock = lambda: time.time() + later_s[0]  # noqa: E731
    with closing(file_tier(tmp_path, 1 << 20, ttl_s=100.0, clock=clock)) as tier:
        level = Level(tier, LAYOUT, verifier, MAC_KEY, ttl_s=100.0)
        soon = time.monotonic() + 60.0
        payloads = [payload_of(block.index) for block in blocks]
        level.write(blocks, [memoryview(payload) for payload in payloads], BOOT, soon)
        into = [bytearray(LAYOUT.payload_bytes) for _ in blocks]
        for _ in range(3):
            later_s[0] += 60.0
            assert level.holds(keys_of(blocks), 0, soon) == 3
            assert level.read(blocks, [memoryview(buffer) for buffer in into], soon) == 3
        assert into == payloads
        assert not level.counts.refused
        later_s[0] += 101.0
        assert level.holds(keys_of(blocks), 0, soon) == 0


def test_where_nothing_else_ends_a_block_its_header_does_and_that_is_no_fault() -> None:
    tier, now_ms = MemoryTier(1 << 20), [wall_ms()]
    tier.caps = replace(tier.caps, dated=True)
    verifier = Verifier(CLUSTER_KEY, LAYOUT, lambda: now_ms[0])
    level = Level(tier, LAYOUT, verifier, MAC_KEY, ttl_s=3_600.0, clock=Clock())
    tier._clock = lambda: 0.0  # what ends here is not of the store's doing
    chains = [run_of(1, seed=seed) for seed in range(DISTRUST_AFTER + 1)]
    for blocks in chains:
        written(level, blocks)
    now_ms[0] += 3_700_000
    assert [read(level, blocks)[0] for blocks in chains] == [0] * len(chains)
    assert level.counts.refused == {Reason.EXPIRED: len(chains)}
    assert level.usable
    assert tier.stats().blocks == 0
    now_ms[0] = wall_ms()
    written(level, chains[0])
    assert level.holds(keys_of(chains[0]), 0, FAR) == 1
    assert read(level, chains[0])[0] == 1


def test_speed_is_learnt() -> None:
    level = level_of(MemoryTier(1 << 20))
    for _ in range(40):
        level.speed.asked(4.0)
        level.speed.read(1_000, 10.0)
    assert abs(level.speed.predict_ms(500) - 9.0) < 0.1


def test_what_was_slow_once_is_tried_again_and_remembered_if_it_still_is() -> None:
    """Nothing is learnt of what one does not ask."""
    clock = Clock()
    speed = Speed(1.0, 1_000.0, clock)
    for _ in range(60):
        speed.asked(101.0)
        speed.read(1_000, 101.0)
    assert abs(speed.predict_ms(1_000) - 202.0) < 0.1
    clock.now += FORGET_S
    assert abs(speed.predict_ms(1_000) - 102.0) < 0.1
    clock.now += 9 * FORGET_S
    assert speed.predict_ms(1_000) < 2.5
    speed.asked(101.0)
    assert abs(speed.latency_ms - 101.0) < 0.1
    clock.now += 10 * FORGET_S
    speed.asked(1.0)
    assert speed.latency_ms < 1.2


def test_what_is_faster_than_was_thought_stays_so() -> None:
    clock = Clock()
    speed = Speed(1.0, 1_000.0, clock)
    for _ in range(60):
        speed.asked(0.5)
    clock.now += 10 * FORGET_S
    assert abs(speed.latency_ms - 0.5) < 0.01
