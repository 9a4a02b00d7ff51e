"""The bytes of bus messages, for ever; and what is no such message."""

from __future__ import annotations

import msgspec
import pytest

from events.digest import DigestDelta
from events.envelope import MAX_BUS_MESSAGE_BYTES, seal, unseal
from events.errors import WireError
from events.load import DigestShape, ReplicaBye
from events.snapshot import SnapshotChunk, SnapshotRequest

DELTA = DigestDelta(b"\x01\0\0\0", b"")


def test_golden_delta_in_its_envelope() -> None:
    data = seal("r0", 1_700_000_000_001, 2, 57, DELTA)
    assert data.hex() == "9601a27230cf0000018bcfe568010239" + "92c40401000000c400"


def test_golden_bye_and_snapshot() -> None:
    assert (
        seal("r0", 1, 1, 0, ReplicaBye(reason="x")).hex() == "9601a2723001010081a6726561736f6ea178"
    )
    encode = msgspec.msgpack.encode
    assert encode(SnapshotRequest(1, 2, 3)).hex() == "93010203"
    chunk = SnapshotChunk(1, 2, DigestShape(bits=64, k=4), 0, 1, b"z", 9)
    assert encode(chunk).hex() == "97010282a462697473" + "40a16b04" + "0001c4017a09"


def test_an_envelope_comes_back_whole() -> None:
    envelope = unseal(seal("r0", 5, 2, 57, DELTA))
    assert (envelope.sender, envelope.boot, envelope.generation, envelope.seq) == ("r0", 5, 2, 57)
    assert msgspec.msgpack.decode(envelope.payload, type=DigestDelta) == DELTA


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\xc1" * 20,
        b"\x80\x04\x95\x00cposix\nsystem\n.",
        b"\x91" * 5_000,
        seal("r0", 5, 2, 57, DELTA)[:-1],
        msgspec.msgpack.encode([2, "r0", 1, 1, 1, None]),
        msgspec.msgpack.encode([1, "r0", "1", 1, 1, None]),
        bytes(MAX_BUS_MESSAGE_BYTES + 1),
    ],
)
def test_S1_what_is_no_envelope_is_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        unseal(data)
