"""The bytes of a header: golden vectors, every byte guarded (K7, S1)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from kvstore.block import (
    MAX_HEADER_BYTES,
    Label,
    decode,
    encode,
    header_bytes,
    header_of,
    label_of,
    layers_of,
)
from kvstore.errors import BadBlockError, Reason
from kvstore.sums import SUM_BYTES, layer_sums
from tests.kvstore.blocks import BOOT, LAYOUT, NOW_MS, header_for, payload_of, run_of

GOLDEN = Path(__file__).parents[1] / "data" / "kv_block_v1.hex"
MAC_KEY = b"k" * 32


def golden() -> list[bytes]:
    return [bytes.fromhex(line) for line in GOLDEN.read_text().split()]


def written() -> list[bytes]:
    """A first block, a private one behind a public prefix, one with a TTL and a MAC."""
    head, tail = run_of(1)[0], run_of(3, salt=b"tenant", cut=1)[2]
    return [
        encode(header_for(head, payload_of(1))),
        encode(header_for(tail, payload_of(2))),
        encode(header_for(head, payload_of(3), ttl_s=60.0), MAC_KEY),
    ]


def test_golden_headers() -> None:
    assert written() == golden()


def test_a_header_is_read_as_it_was_written() -> None:
    block, payload = run_of(2)[1], payload_of(4)
    header = header_for(block, payload, ttl_s=1.5)
    assert decode(encode(header)) == header
    assert decode(encode(header, MAC_KEY), MAC_KEY) == header
    assert header.expires_ms == NOW_MS + 1_500
    assert header.sums == layer_sums(payload, LAYOUT.layers)
    assert layers_of(encode(header)) == LAYOUT.layers
    assert header_bytes(encode(header)[:12]) == len(encode(header)) <= MAX_HEADER_BYTES


@pytest.mark.parametrize("which", range(3))
def test_every_flipped_bit_and_every_cut_is_found(which: int) -> None:
    data = golden()[which]
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << random.Random(at).randrange(8)
        with pytest.raises(BadBlockError):
            decode(changed)
        with pytest.raises(BadBlockError):
            decode(data[:at])
    with pytest.raises(BadBlockError):
        decode(data + b"\0")


def test_the_mac_binds_every_byte() -> None:
    header = header_for(run_of(1)[0], payload_of())
    with pytest.raises(BadBlockError) as wrong:
        decode(encode(header, b"another key of the same size...."), MAC_KEY)
    assert wrong.value.reason is Reason.MAC
    with pytest.raises(BadBlockError) as missing:
        decode(encode(header), MAC_KEY)
    assert missing.value.reason is Reason.MAC


def test_a_label_says_what_the_header_says_and_refuses_what_it_refuses() -> None:
    for data in golden():
        header = decode(data)
        block = header.block
        assert label_of(data) == Label(
            block.key, block.namespace, block.scope, header.payload_bytes
        )
        for at in range(len(data)):
            changed = bytearray(data[:-SUM_BYTES])
            if at < len(changed):
                changed[at] ^= 1 << random.Random(at).randrange(8)
            changed += xxh3_64_digest(changed)
            assert refused(label_of, changed) == refused(decode, changed), at


def refused(read: Callable[[bytes], object], data: bytes) -> Reason | None:
    try:
        read(data)
    except BadBlockError as error:
        return error.reason
    return None


@given(st.binary(max_size=400))
def test_S1_random_bytes_are_refused_by_name(data: bytes) -> None:
    for attempt in (data, golden()[0][:12] + data, golden()[0][:168] + data):
        with pytest.raises(BadBlockError) as refused:
            decode(attempt)
        assert refused.value.reason in Reason


def test_a_block_of_another_size_gets_no_header() -> None:
    block = run_of(1)[0]
    with pytest.raises(ValueError):
        header_of(block, LAYOUT, payload_of()[:-1], BOOT)
