"""From the cache to vLLM's words: each change in order, bounded, the bytes as vLLM has them."""

from __future__ import annotations

import random
import struct

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from events.kvevents import BlocksCleared, BlocksRemoved, BlocksStored, decode_batch, encode_batch
from events.load import KVLayout
from kvstore.identity import Namespace, chain
from replica.cache.journal import Journal
from replica.cache.pool import BlockPool
from replica.cache.prefix import PrefixCache
from replica.kv_events.log import KvEventLog, engine_hash
from tools.bridge.cache import EngineCache

KEY, SALT, BLOCK = b"\5" * 32, b"salt", 4
LAYOUT = KVLayout(dtype="f", layers=1, kv_heads=1, head_dim=2, block_tokens=BLOCK, rope="r")
SPACE = Namespace("m", "w", LAYOUT)


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """As vLLM 0.32 declares its events: maps, the type beside the fields."""


class BlockStored(KVCacheEvent):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


GOLDEN = (
    "93cb3ff8000000000000948ba474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739207"
    "cfffffffffffffffffb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa"
    "626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65"
    "787472615f6b65797392c0c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66"
    "756c6c5f617474656e74696f6e8ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573"
    "9109b1706172656e745f626c6f636b5f6861736807a9746f6b656e5f696473920506aa626c6f636b5f73697a"
    "6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b657973"
    "91c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74"
    "696f6e84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739109a66d656469756d"
    "a3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656400"
)


def pack(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def test_blocks_of_an_adapter_carry_its_name() -> None:
    log = KvEventLog(2)
    log.stored(b"a" * 16, None, pack([1, 2]))
    log.stored(b"b" * 16, None, pack([1, 2]), "pirate")
    log.stored(b"c" * 16, b"b" * 16, pack([3, 4]), "pirate")
    events = log.drain()
    assert [event.adapter for event in events] == ["", "pirate"]
    assert decode_batch(encode_batch(1.0, events)) == events


def test_golden_bytes_and_vllms_own_structs() -> None:
    events = [
        BlocksStored((7, 2**64 - 1), None, (1, 2, 3, 4), 2, (None, None)),
        BlocksStored((9,), 7, (5, 6), 2, (None,)),
        BlocksRemoved((9,)),
        BlocksCleared(),
    ]
    payload = encode_batch(1.5, events)
    assert payload.hex() == GOLDEN
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    assert batch.data_parallel_rank == 0
    first, second, third, fourth = batch.events
    assert (first.block_hashes, first.parent_block_hash) == ([7, 2**64 - 1], None)
    assert (second.parent_block_hash, second.token_ids, second.block_size) == (7, [5, 6], 2)
    assert third == BlockRemoved([9], "GPU", 0)
    assert isinstance(fourth, AllBlocksCleared)
    assert decode_batch(payload) == events


def test_what_vllm_writes_is_what_we_write() -> None:
    stored = BlockStored([7], None, [1, 2], 2, None, "GPU", None, [None], 0, "full_attention")
    theirs = msgspec.msgpack.encode(KVEventBatch(1.5, [stored, BlockRemoved([7], "GPU", 0)], 0))
    ours = [BlocksStored((7,), None, (1, 2), 2, (None,)), BlocksRemoved((7,))]
    assert encode_batch(1.5, ours) == theirs


def test_blocks_that_follow_one_another_are_one_event() -> None:
    log = KvEventLog(2)
    keys = [bytes([n]) * 16 for n in range(4)]
    log.stored(keys[0], None, pack([1, 2]))
    log.stored(keys[1], keys[0], pack([3, 4]))
    log.stored(keys[2], keys[0], pack([5, 6]))
    log.removed(keys[2])
    log.stored(keys[3], keys[1], pack([7, 8]))
    first, second, third, fourth = log.drain()
    assert first.hashes == (engine_hash(keys[0]), engine_hash(keys[1]))
    assert first.token_ids == (1, 2, 3, 4)
    assert second.parent == engine_hash(keys[0])
    assert third == BlocksRemoved((engine_hash(keys[2]),))
    assert fourth.parent == engine_hash(keys[1])
    assert log.drain() == []


def test_E12_a_log_that_nobody_reads_is_bounded_and_says_so() -> None:
    log = KvEventLog(2, limit=5)
    for number in range(23):
        log.removed(bytes([number]) * 16)
    events = log.drain()
    assert len(events) <= 6
    assert events[0] == BlocksCleared()
    assert log.dropped > 0


@given(st.integers(0, 2**32))
def test_a_bridge_that_reads_it_knows_the_cache(seed: int) -> None:
    """Prompts come and go in a small pool; after each the reader's keys are the cache's."""
    rng = random.Random(seed)
    cache = PrefixCache(BlockPool(12), Journal(), BLOCK)
    log = cache.watcher = KvEventLog(BLOCK)
    journal, believed = Journal(), set[bytes]()
    reader = EngineCache(KEY, SPACE, (SALT,), journal)
    for _ in range(12):
        tokens = pack([rng.randrange(3) for _ in range(BLOCK * rng.randint(1, 5))])
        keys = list(chain(KEY, SPACE, SALT, tokens))
        with cache.lookup(keys, tokens, len(keys)) as lease:
            if cache.available >= len(keys) - len(lease):
                blocks, nodes = lease.take("acme")
                fresh = cache.allocate(len(keys) - len(nodes))
                parent = nodes[-1] if nodes else None
                for index, block in enumerate(fresh, len(nodes)):
                    part = tokens[4 * BLOCK * index : 4 * BLOCK * (index + 1)]
                    parent = cache.publish(parent, keys[index], part, block, "acme")
                cache.release([*blocks, *fresh])
        if rng.random() < 0.1:
            cache.clear()
        if events := log.drain():
            reader.apply(decode_batch(encode_batch(0.0, events)))
        for op, key in journal.drain():
            (believed.add if op.name == "STORED" else believed.discard)(key)
        assert believed == set(cache.nodes())
