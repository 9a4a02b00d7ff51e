"""What a store sees of sealed blocks, and that nobody can change or move them (S2, C5)."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from events.secrets import block_mac_key
from kvstore.block import BlockHeader, decode, encode
from kvstore.errors import BadBlockError, Reason
from kvstore.seal import Sealer
from kvstore.sealed import SealedTier
from kvstore.tier import Read, Status, Write
from kvstore.verify import Verifier
from tests.fakes.memory_tier import MemoryTier
from tests.kvstore.batches import SOON_S, get, put, writes_of
from tests.kvstore.blocks import CLUSTER_KEY, LAYOUT, NOW_MS, header_for, payload_of, run_of

MAC_KEY = block_mac_key(CLUSTER_KEY)
SEALER = Sealer(CLUSTER_KEY, LAYOUT, MAC_KEY)
BLOCK = run_of(2)[1]
PAYLOAD = payload_of(5)
HEADER = encode(header_for(BLOCK, PAYLOAD), MAC_KEY)


def unsealed(header: bytes, sealed: bytes, sealer: Sealer = SEALER) -> tuple[bytes, bytes]:
    into = bytearray(LAYOUT.payload_bytes)
    return sealer.unseal(header, memoryview(sealed), memoryview(into)), bytes(into)


def test_a_sealed_block_is_opened_as_it_was() -> None:
    header, sealed = SEALER.seal(HEADER, memoryview(PAYLOAD))
    assert unsealed(header, sealed) == (HEADER, bytes(PAYLOAD))
    assert SEALER.seal(HEADER, memoryview(PAYLOAD))[1] != sealed


def test_S2_the_store_sees_neither_tokens_nor_values() -> None:
    header, sealed = SEALER.seal(HEADER, memoryview(PAYLOAD))
    shown = decode(header, MAC_KEY)
    assert shown.block == replace(BLOCK, tokens=bytes(16))
    for seen in (header, sealed):
        assert BLOCK.tokens not in seen
        assert bytes(PAYLOAD[:16]) not in seen


def test_every_changed_byte_is_found_and_nothing_is_written() -> None:
    header, sealed = SEALER.seal(HEADER, memoryview(PAYLOAD))
    for at in range(len(sealed) - LAYOUT.layers):  # what fills it up at the end is not read
        changed = bytearray(sealed)
        changed[at] ^= 1
        into = bytearray(LAYOUT.payload_bytes)
        with pytest.raises(BadBlockError) as refused:
            SEALER.unseal(header, memoryview(changed), memoryview(into))
        assert refused.value.reason is Reason.SEAL
        assert not any(into)


def test_C5_a_block_cannot_be_passed_off_as_another() -> None:
    """Whoever can write to the store, even with the MAC's key, can't swap identities or owners."""
    header, sealed = SEALER.seal(HEADER, memoryview(PAYLOAD))
    shown = decode(header)
    for change in (
        {"key": run_of(1)[0].key},
        {"scope": run_of(1, salt=b"other")[0].scope},
        {"namespace": bytes(16)},
        {"parent": bytes(16)},
        {"index": 7},
    ):
        forged = encode(replace(shown, block=replace(shown.block, **change)), MAC_KEY)
        with pytest.raises(BadBlockError) as refused:
            unsealed(forged, sealed)
        assert refused.value.reason is Reason.SEAL
    with pytest.raises(BadBlockError):
        unsealed(encode(replace(shown, expires_ms=1), MAC_KEY), sealed)
    with pytest.raises(BadBlockError):
        unsealed(header, sealed, Sealer(bytes(32), LAYOUT, MAC_KEY))


def test_the_tier_gives_back_what_it_was_given() -> None:
    inner, blocks = MemoryTier(1 << 20), run_of(3)
    tier, verifier = SealedTier(inner, SEALER), Verifier(CLUSTER_KEY, LAYOUT, lambda: NOW_MS)
    writes = writes_of(blocks)
    assert put(tier, writes[:2]) == [Status.STORED] * 2
    assert put(tier, writes) == [Status.PRESENT, Status.PRESENT, Status.STORED]
    outcomes, payloads, landed = get(tier, [block.key for block in blocks])
    assert payloads == [bytes(write.payload) for write in writes]
    assert landed == [0, 1, 2]
    for outcome, block, payload in zip(outcomes, blocks, payloads, strict=True):
        assert isinstance(verifier.verdict(outcome, block, payload), BlockHeader)
    assert tier.exists_prefix([block.key for block in blocks], time.monotonic() + 1) == 3
    assert tier.purge(blocks[0].scope) == 3


def test_what_was_not_sealed_here_is_a_failure_not_a_hit() -> None:
    inner, (block,) = MemoryTier(1 << 20), run_of(1)
    tier = SealedTier(inner, SEALER)
    other = Sealer(bytes(32), LAYOUT, MAC_KEY)
    header, sealed = other.seal(HEADER, memoryview(PAYLOAD))
    inner.put([Write(BLOCK.key, header, memoryview(sealed))], time.monotonic() + SOON_S)
    assert get(tier, [BLOCK.key])[0][0].reason == "seal"
    small = Read(BLOCK.key, memoryview(bytearray(5)))
    assert tier.get([small], time.monotonic() + SOON_S).result(SOON_S)[0].reason == "size"
    short = Write(block.key, HEADER, memoryview(PAYLOAD)[:-1])
    assert tier.put([short], time.monotonic() + SOON_S).result(SOON_S)[0].reason == "size"
