"""Blocks through an arena in this process (K5, K7, C5)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from threading import Event, Thread

import pytest

from kvstore.arena import tier as arena_tier
from kvstore.arena.arena import Arena
from kvstore.arena.control import LocalControl
from kvstore.arena.limits import ArenaLimits
from kvstore.arena.messages import Opened
from kvstore.arena.segment import Bytes, Segment
from kvstore.arena.source import ArenaSource
from kvstore.arena.tier import ArenaTier
from kvstore.block import BlockHeader, HeaderDraft, encode, unsummed
from kvstore.errors import Reason
from kvstore.handle import Job
from kvstore.known import Known
from kvstore.tier import Health, Read, Status, Write
from kvstore.verify import Verifier
from tests.kvstore.batches import SOON_S, get, put, writes_of
from tests.kvstore.blocks import (
    BOOT,
    CLUSTER_KEY,
    LAYOUT,
    NOW_MS,
    encoded,
    header_for,
    payload_of,
    run_of,
)

MAC_KEY = b"k" * 32
VERIFIER = Verifier(CLUSTER_KEY, LAYOUT, now_ms=lambda: NOW_MS)


@pytest.fixture
def arena() -> Arena:
    return Arena(Segment.private(1 << 20), ArenaLimits(lease_s=0.5))


@pytest.fixture
def tier(arena: Arena) -> Iterator[ArenaTier]:
    tier = ArenaTier.local(arena)
    yield tier
    tier.close()
    arena.check()
    assert arena.stats().sessions == arena.stats().leased == arena.stats().writing == 0


def test_what_was_put_is_read_and_set_once(tier: ArenaTier) -> None:
    blocks = run_of(4)
    writes = writes_of(blocks)
    assert put(tier, writes[:3]) == [Status.STORED] * 3
    assert put(tier, writes) == [*[Status.PRESENT] * 3, Status.STORED]
    outcomes, payloads, landed = get(tier, [block.key for block in blocks])
    assert payloads == [bytes(write.payload) for write in writes]
    assert landed == [0, 1, 2, 3]
    for outcome, payload, block in zip(outcomes, payloads, blocks, strict=True):
        assert isinstance(VERIFIER.verdict(outcome, block, payload), BlockHeader)
    stats = tier.stats()
    assert (stats.hits, stats.stored, stats.present) == (4, 4, 3)
    assert stats.read_bytes == stats.written_bytes == 4 * LAYOUT.payload_bytes
    assert tier.health() is Health.OK


def test_checksums_may_be_made_while_a_block_is_copied(tier: ArenaTier) -> None:
    """What is stored is byte for byte what a writer with a finished header stores."""
    block, payload = run_of(1)[0], payload_of(3)
    whole = header_for(block, payload)
    draft = HeaderDraft(unsummed(block, LAYOUT, BOOT, now_ms=NOW_MS), MAC_KEY)
    write = Write(block.key, b"", memoryview(payload), None, draft)
    assert put(tier, [write]) == [Status.STORED]
    (outcome,), (read,), _ = get(tier, [block.key])
    assert outcome.header == encode(whole, MAC_KEY)
    assert read == payload
    wrong = Write(run_of(2)[1].key, b"", memoryview(payload), None, draft)
    (outcome,) = tier.put([wrong], time.monotonic() + SOON_S).result(SOON_S)
    assert (outcome.status, outcome.reason) == (Status.FAILED, "commit")


def test_behind_a_hole_all_are_misses(tier: ArenaTier) -> None:
    blocks = run_of(4)
    put(tier, writes_of(blocks))
    tier.delete([blocks[1].key])
    outcomes, payloads, landed = get(tier, [block.key for block in blocks])
    assert [outcome.status for outcome in outcomes] == [Status.HIT, *[Status.MISS] * 3]
    assert payloads[1:] == [bytes(LAYOUT.payload_bytes)] * 3
    assert landed == [0]
    assert tier.exists_prefix([block.key for block in blocks], time.monotonic() + 1) == 1
    assert tier.exists_prefix([block.key for block in blocks[2:]], time.monotonic() + 1) == 2


def test_a_corrupt_byte_anywhere_is_found(tier: ArenaTier, arena: Arena) -> None:
    """In keys, values or padding, of any layer: it lies in the shared memory itself."""
    block = run_of(1)[0]
    put(tier, writes_of([block]))
    session = arena.session("spoiler")
    (opened,) = arena.open(session, [block.key])
    slot = arena.segment.slot(opened.place.offset, LAYOUT.payload_bytes)
    arena.release(session, [opened.place])
    for at in range(LAYOUT.payload_bytes):
        slot[at] ^= 1
        (outcome,), (payload,), _ = get(tier, [block.key])
        slot[at] ^= 1
        assert VERIFIER.verdict(outcome, block, payload) is Reason.PAYLOAD
        header = VERIFIER.header(outcome.header, block)
        assert isinstance(header, BlockHeader)
        assert VERIFIER.payload(header, payload) is Reason.PAYLOAD
    (outcome,), (payload,), _ = get(tier, [block.key])
    assert isinstance(VERIFIER.verdict(outcome, block, payload), BlockHeader)
    arena.end(session)


def test_a_wrong_header_is_not_stored(tier: ArenaTier) -> None:
    block, other = run_of(2)
    payload = payload_of()
    good = encoded(block, payload)
    for header, key, size in (
        (good[:-1], block.key, len(payload)),
        (good, other.key, len(payload)),
        (good, block.key, len(payload) - 1),
    ):
        write = Write(key, header, memoryview(payload)[:size])
        (outcome,) = tier.put([write], time.monotonic() + SOON_S).result(SOON_S)
        assert outcome.status is Status.FAILED
    assert get(tier, [block.key])[0][0].status is Status.MISS


def test_a_buffer_of_another_size_gets_nothing(tier: ArenaTier) -> None:
    block = run_of(1)[0]
    put(tier, writes_of([block]))
    buffer = bytearray(LAYOUT.payload_bytes + 1)
    handle = tier.get([Read(block.key, memoryview(buffer))], time.monotonic() + SOON_S)
    assert handle.result(SOON_S)[0].reason == "size"
    assert not any(buffer)


def test_C5_a_tenants_blocks_are_purged(tier: ArenaTier) -> None:
    mine, theirs = run_of(2, salt=b"a"), run_of(2, salt=b"b")
    put(tier, writes_of([*mine, *theirs]))
    assert tier.purge(mine[0].scope) == 2
    deadline = time.monotonic() + 1
    assert tier.exists_prefix([mine[0].key], deadline) == 0
    assert tier.exists_prefix([block.key for block in theirs], deadline) == 2


def _untold(known: Known) -> Callable[[], None]:
    raise AssertionError


class Meddler(LocalControl):
    """Lets something happen between the leases and the copies."""

    def __init__(self, arena: Arena, name: str, meddle: Event, done: Event) -> None:
        super().__init__(arena, name)
        self.meddle, self.done = meddle, done

    def open(self, keys: Sequence[bytes], deadline: float) -> Sequence[Opened]:
        opened = super().open(keys, deadline)
        self.meddle.set()
        assert self.done.wait(SOON_S)
        return opened


def test_K5_a_reader_that_outlasts_its_lease_gets_a_miss_not_another_block(arena: Arena) -> None:
    """TTL 0.5 s, a slow reader, eviction and overwriting meanwhile."""
    meddle, done = Event(), Event()
    slow = ArenaTier(lambda name, _: Meddler(arena, name, meddle, done), False, _untold)
    quick = ArenaTier.local(arena)
    block, others = run_of(1)[0], run_of(300, seed=1)
    put(quick, writes_of([block], ttl_s=0.5))
    into = bytearray(LAYOUT.payload_bytes)
    handle = slow.get([Read(block.key, memoryview(into))], time.monotonic() + SOON_S)
    assert meddle.wait(SOON_S)
    while arena.exists_prefix([block.key]):
        arena.tick()
    for start in range(0, 300, 100):
        assert put(quick, writes_of(others[start : start + 100])) == [Status.STORED] * 100
    assert arena.stats().evicted > 0
    done.set()
    assert handle.result(SOON_S)[0].status is Status.MISS
    slow.close()
    quick.close()
    arena.check()


class Forgetful(Segment):
    """In the moment in which a slot is looked at, its block is forgotten."""

    forget: Callable[[], object] | None = None

    def slot(self, offset: int, size: int) -> Bytes:
        if self.forget is not None:
            self.forget()
        return super().slot(offset, size)


def test_K5_a_block_that_is_forgotten_during_the_copy_is_a_miss() -> None:
    segment = Forgetful(1 << 20, None)
    arena = Arena(segment)
    tier, (block,) = ArenaTier.local(arena), run_of(1)
    put(tier, writes_of([block]))
    segment.forget = lambda: arena.delete([block.key])
    assert get(tier, [block.key])[0][0].status is Status.MISS
    segment.forget = None
    tier.close()
    arena.check()
    assert arena.stats().used_bytes == 0


def test_long_runs_are_asked_for_page_by_page(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_tier, "MAX_KEYS", 2)
    tier, blocks = ArenaTier.local(arena), run_of(5)
    keys = [block.key for block in blocks]
    put(tier, writes_of(blocks))
    assert tier.exists_prefix(keys, time.monotonic() + 1) == 5
    assert [outcome.status for outcome in get(tier, keys)[0]] == [Status.HIT] * 5
    tier.delete([keys[3]])
    assert tier.exists_prefix(keys, time.monotonic() + 1) == 3
    assert get(tier, keys)[2] == [0, 1, 2]
    tier.close()


def test_K1_a_cancelled_read_touches_its_buffers_no_more(arena: Arena) -> None:
    meddle, done = Event(), Event()
    tier = ArenaTier(lambda name, _: Meddler(arena, name, meddle, done), False, _untold)
    blocks = run_of(3)
    put(tier, writes_of(blocks))
    buffers = [bytearray(LAYOUT.payload_bytes) for _ in blocks]
    reads = [Read(b.key, memoryview(i)) for b, i in zip(blocks, buffers, strict=True)]
    handle = tier.get(reads, time.monotonic() + SOON_S)
    assert meddle.wait(SOON_S)
    canceller = Thread(target=handle.cancel)
    canceller.start()
    assert isinstance(handle, Job)
    while handle.stopping is None:
        assert canceller.is_alive()
    done.set()
    canceller.join(SOON_S)
    assert not canceller.is_alive()
    assert [outcome.reason for outcome in handle.result(0)] == ["cancelled"] * 3
    assert not any(map(any, buffers))
    tier.close()
    assert arena.stats().leased == 0


def test_a_server_sends_from_the_arena_itself(tier: ArenaTier, arena: Arena) -> None:
    blocks = run_of(3)
    writes = writes_of(blocks)
    put(tier, writes[:2])
    source = ArenaSource(arena, "peer")
    leased = source.lease([block.key for block in blocks])
    assert [block.header for block in leased] == [write.header for write in writes[:2]]
    tier.delete([blocks[0].key])
    assert [bytes(block.payload) for block in leased] == [bytes(w.payload) for w in writes[:2]]
    source.release(leased)
    assert arena.stats().dying == 0
    source.close()


def test_the_closed_tier_takes_nothing(arena: Arena) -> None:
    tier = ArenaTier.local(arena)
    writes = writes_of(run_of(1))
    tier.close()
    tier.close()
    assert tier.put(writes, time.monotonic() + 1).result(1)[0].reason == "closed"
    assert tier.exists_prefix([writes[0].key], time.monotonic() + 1) == 0
