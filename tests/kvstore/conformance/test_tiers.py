"""What every tier promises, on every store that it may stand on."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from events.load import KVLayout
from kvstore.block import Signed, decode, encode
from kvstore.tier import MISS, PRESENT, STORED, Health, Read, Status, Tier
from tests.kvstore.conformance.asking import WAIT_S, Seed, exists, get, on, put, soon
from tests.kvstore.conformance.backend import Backend
from tests.kvstore.conformance.blocks import (
    LARGE,
    MAC_KEY,
    SMALL,
    Block,
    chain_of,
    reads_into,
    verdict,
)
from tests.waiting import wait_until

OTHER_KEY = bytes(32)


@on()
def test_what_was_stored_comes_back_in_order(backend: Backend, tier: Tier, seed: Seed) -> None:
    chain = chain_of(12, seed())
    assert exists(tier, chain) == 0
    assert get(tier, chain)[0] == ["miss"] * 12
    before = tier.stats()
    backend.store(chain)
    assert exists(tier, chain) == 12
    landed: list[int] = []
    rooms = [block.room() for block in chain]
    outcomes = tier.get(reads_into(chain, rooms), soon(), landed.append).result(WAIT_S)
    assert [verdict(*each) for each in zip(chain, outcomes, rooms, strict=True)] == ["good"] * 12
    assert sorted(landed) == list(range(12))
    after = tier.stats()
    assert after.hits - before.hits == 12
    assert after.read_bytes - before.read_bytes == 12 * chain[0].layout.payload_bytes
    assert tier.health() is Health.OK


@on()
def test_large_blocks(backend: Backend, tier: Tier, seed: Seed) -> None:
    chain = chain_of(4, seed(), kv=LARGE)
    assert chain[0].layout.payload_bytes >= 512 * 1024
    backend.store(chain)
    assert get(tier, chain)[0] == ["good"] * 4


@on(writable=True)
def test_duplicate_put_keeps_the_first(backend: Backend, tier: Tier, seed: Seed) -> None:
    chain = chain_of(3, seed())
    assert put(tier, chain) == [STORED] * 3
    others = [replace(block, payload=bytes(len(block.payload))) for block in chain]
    assert put(tier, others) == [PRESENT] * 3
    assert get(tier, chain)[0] == ["good"] * 3


@on(writable=True)
def test_many_writers_of_one_key_leave_one_whole_block(
    backend: Backend, tier: Tier, seed: Seed
) -> None:
    [block] = chain_of(1, seed(), kv=LARGE)
    tiers = [backend.open() for _ in range(3)]
    handles = [each.put([block.write()], soon()) for each in tiers]
    outcomes = [handle.result(WAIT_S)[0].status for handle in handles]
    assert outcomes.count(Status.STORED) == 1
    assert outcomes.count(Status.PRESENT) == 2
    assert get(tier, [block])[0] == ["good"]
    for each in tiers:
        backend.release(each)


@on()
def test_holes_end_the_prefix(backend: Backend, tier: Tier, seed: Seed) -> None:
    chain = chain_of(6, seed())
    backend.store([*chain[:3], *chain[4:]])
    assert exists(tier, chain) == 3
    seen = get(tier, chain)[0]
    assert seen[:4] == ["good"] * 3 + ["miss"]
    assert set(seen[4:]) <= {"good", "miss"}
    assert exists(tier, chain[3:]) == 0


@on()
def test_a_room_of_another_size_is_not_filled(backend: Backend, tier: Tier, seed: Seed) -> None:
    chain = chain_of(3, seed())
    backend.store(chain)
    rooms = [chain[0].room(), bytearray(7), chain[2].room()]
    outcomes = tier.get(reads_into(chain, rooms), soon()).result(WAIT_S)
    assert outcomes[1].reason == "size"
    assert rooms[1] == bytes(7)
    assert verdict(chain[0], outcomes[0], rooms[0]) == "good"
    assert verdict(chain[2], outcomes[2], rooms[2]) == "good"


@on(writable=True)
def test_delete_forgets(backend: Backend, tier: Tier, seed: Seed) -> None:
    chain = chain_of(3, seed())
    put(tier, chain)
    tier.delete([chain[1].key, b"no such key....."])
    assert exists(tier, chain) == 1
    seen = get(tier, chain)[0]
    assert seen[:2] == ["good", "miss"]
    assert seen[2] in ("good", "miss")  # behind a hole a tier may stop
    assert put(tier, chain) == [PRESENT, STORED, PRESENT]


@on("purge")
def test_C5_a_tenants_blocks_are_purged_and_nobody_elses(
    backend: Backend, tier: Tier, seed: Seed
) -> None:
    number = seed()
    mine, other = chain_of(40, number, b"mine"), chain_of(3, number, b"other")
    assert not {block.key for block in mine} & {block.key for block in other}
    put(tier, [*mine, *other])
    identity = mine[0].identity
    owner = identity.scope if any(identity.scope) else identity.namespace
    assert owner not in (other[0].identity.scope, other[0].identity.namespace)
    assert tier.purge(owner) == 40
    assert exists(tier, mine) == 0
    assert get(tier, other)[0] == ["good"] * 3
    assert tier.purge(owner) == 0


@on("purge")
def test_C5_all_that_a_cluster_wrote_is_purged_whoever_of_it_did(
    backend: Backend, tier: Tier, seed: Seed
) -> None:
    number = seed()
    ours = [*chain_of(5, number, b"mine"), *chain_of(3, number, b"yours")]
    signed = chain_of(3, number, b"another cluster's")
    theirs = [replace(of, header=encode(decode(of.header), OTHER_KEY)) for of in signed]
    put(tier, [*ours, *theirs])
    assert tier.purge(Signed(MAC_KEY)) >= len(ours)
    assert exists(tier, ours[:5]) == exists(tier, ours[5:]) == 0
    if not tier.caps.trusted:  # where strangers write, they keep what is theirs
        assert exists(tier, theirs) == 3
    assert tier.purge(Signed(MAC_KEY)) == 0
    tier.purge(Signed(OTHER_KEY))


@on("ttl", writable=True)
def test_blocks_die_after_their_time(backend: Backend, tier: Tier, seed: Seed) -> None:
    short, lasting = chain_of(1, seed()), chain_of(2, seed())
    put(tier, short, ttl_s=0.2)
    put(tier, lasting)
    wait_until(lambda: get(tier, short)[0] == ["miss"])
    assert exists(tier, short) == 0
    assert put(tier, short) == [STORED]
    assert get(tier, lasting)[0] == ["good"] * 2


def offsets(block: Block) -> dict[str, int]:
    head = len(block.header)
    return {
        "magic": 0,
        "version": 4,
        "header size": 8,
        "key": 24,
        "namespace": 56,
        "tokens": 172,
        "header sum": head - 1,
        "mac": head - 9,
        "payload": head,
        "padding or last layer": head + len(block.payload) // 2,
        "last byte": head + len(block.payload) - 1,
    }


@on("raw")
def test_K5_a_flipped_bit_anywhere_is_no_hit(backend: Backend, tier: Tier, seed: Seed) -> None:
    [block] = chain_of(1, seed())
    backend.store([block])
    for name, offset in offsets(block).items():
        value = bytearray(block.value)
        value[offset] ^= 0x10
        backend.overwrite(block.key, bytes(value))
        assert get(tier, [block])[0] != ["good"], name
    backend.overwrite(block.key, block.value)
    assert get(tier, [block])[0] == ["good"]


@on("raw")
def test_truncated_values_are_no_hits(backend: Backend, tier: Tier, seed: Seed) -> None:
    [block] = chain_of(1, seed())
    backend.store([block])
    size = len(block.value)
    for length in (1, 11, len(block.header) - 1, len(block.header), size // 2, size - 1):
        backend.overwrite(block.key, block.value[:length])
        assert get(tier, [block])[0] != ["good"], length
    backend.overwrite(block.key, block.value + b"x")
    assert get(tier, [block])[0] != ["good"]


@on("raw")
def test_K7_wrong_layout_namespace_or_block_under_a_key(
    backend: Backend, tier: Tier, seed: Seed
) -> None:
    number = seed()
    block, sibling = chain_of(2, number)
    turned: KVLayout = msgspec.structs.replace(SMALL, dtype="float16")
    [other_dtype] = chain_of(1, number, kv=turned)
    [other_tenant] = chain_of(1, number, b"other")
    assert other_dtype.layout.payload_bytes == block.layout.payload_bytes
    backend.store([block])
    for wrong, reason in (
        (other_dtype, {"namespace", "layout"}),
        (other_tenant, {"namespace"}),
        (sibling, {"key"}),
    ):
        backend.overwrite(block.key, wrong.value)
        [seen], _ = get(tier, [block])
        assert seen in reason


@on("raw")
def test_eviction_during_reads(backend: Backend, tier: Tier, seed: Seed) -> None:
    chain = chain_of(8, seed(), kv=LARGE)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for block in chain[::2]:
                backend.drop(block.key)
            backend.store(chain[::2])

    backend.store(chain)
    churner = threading.Thread(target=churn)
    churner.start()
    try:
        seen = {each for _ in range(12) for each in get(tier, chain)[0]}
    finally:
        stop.set()
        churner.join()
    assert seen <= {"good", "miss"}


@on()
def test_past_deadlines_and_empty_batches(backend: Backend, tier: Tier, seed: Seed) -> None:
    [block] = chain_of(1, seed())
    past = time.monotonic() - 1
    read = Read(block.key, memoryview(block.room()))
    assert tier.get([read], past).result(5)[0].reason == "deadline"
    assert list(tier.get([], soon()).result(5)) == []
    assert list(tier.put([], soon()).result(5)) == []
    assert tier.exists_prefix([], soon()) == 0


@on()
def test_threads_share_a_tier(backend: Backend, tier: Tier, seed: Seed) -> None:
    chains = [chain_of(6, seed()) for _ in range(6)]
    for chain in chains[:3]:
        backend.store(chain)
    seen: list[str] = []

    def read(chain: Sequence[Block]) -> None:
        for _ in range(5):
            seen.extend(get(tier, chain)[0])

    threads = [threading.Thread(target=read, args=(chain,)) for chain in chains]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen.count("good") == 3 * 6 * 5
    assert seen.count("miss") == 3 * 6 * 5


@on()
def test_misses_are_not_failures(backend: Backend, tier: Tier, seed: Seed) -> None:
    chain = chain_of(3, seed())
    outcomes = tier.get(reads_into(chain, [block.room() for block in chain]), soon()).result(WAIT_S)
    assert list(outcomes) == [MISS] * 3
