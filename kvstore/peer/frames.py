"""The peer protocol's bytes. Little endian; every length is checked before anything is read for it.

Every frame begins with

    kind u8 | 0 u8 | 0 u16 | request u32 | body bytes u32

and a connection starts with HELLO (magic, which ends in the version; client's nonce), HELLO_REPLY
(server's nonce, MAC) and PROOF (MAC): each end shows that it holds the cluster's secret, over both
nonces, before it says anything else. The bytes behind that are encrypted where the connection is
TLS, which both ends are told to want; forged blocks fail their own checks.

One request at a time: PULL (run of keys, deadline, window) is answered by a BLOCK for each key in
order, up to the first one that is not there, and one END; ASK by a COUNT; NAME, since version 2, by
a NAMED (what routers call the store, empty for none). During a PULL, CREDIT allows the server so
many bytes more and CANCEL makes it end at the next block.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvstore.block import MAX_HEADER_BYTES
from kvstore.chainhash import KEY_BYTES
from kvstore.stream import Stream, WireBrokenError

MAGIC = b"wrpeer2\0"
SERVED = (b"wrpeer1\0", MAGIC)
"""What a server takes: this version and the one before."""
NONCE_BYTES = 16
MAC_BYTES = 16
MIN_SECRET_BYTES = 16
MAX_KEYS = 4_096
MAX_NAME_BYTES = 256
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
FRAME = struct.Struct("<BBHII")
PULL_HEAD = struct.Struct("<IIQ")
BLOCK_HEAD = struct.Struct("<III")
NUMBER = struct.Struct("<Q")


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    HELLO_REPLY = 2
    PROOF = 3
    PULL = 4
    BLOCK = 5
    END = 6
    CREDIT = 7
    CANCEL = 8
    ASK = 9
    COUNT = 10
    NAME = 11
    NAMED = 12


class Ended(IntEnum):
    """How a PULL ended; what was not sent by then does not come any more."""

    DONE = 0
    MISSING = 1
    CANCELLED = 2
    EXPIRED = 3
    FAILED = 4


_BODY_BYTES = {
    Kind.HELLO: (len(MAGIC) + NONCE_BYTES,) * 2,
    Kind.HELLO_REPLY: (NONCE_BYTES + MAC_BYTES,) * 2,
    Kind.PROOF: (MAC_BYTES,) * 2,
    Kind.PULL: (PULL_HEAD.size + KEY_BYTES, PULL_HEAD.size + MAX_KEYS * KEY_BYTES),
    Kind.BLOCK: (BLOCK_HEAD.size, BLOCK_HEAD.size + MAX_HEADER_BYTES + MAX_PAYLOAD_BYTES),
    Kind.END: (1, 1),
    Kind.CREDIT: (NUMBER.size,) * 2,
    Kind.CANCEL: (0, 0),
    Kind.ASK: (KEY_BYTES, MAX_KEYS * KEY_BYTES),
    Kind.COUNT: (NUMBER.size,) * 2,
    Kind.NAME: (0, 0),
    Kind.NAMED: (0, MAX_NAME_BYTES),
}
"""The least and the most that a body may have."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame's head; its body comes next on the stream."""

    kind: Kind
    request: int
    body_bytes: int


@dataclass(frozen=True, slots=True)
class Pull:
    """A run of blocks wanted within `deadline_ms`; `window_bytes` may be sent without CREDIT."""

    deadline_ms: int
    window_bytes: int
    keys: Sequence[bytes]


def read_head(stream: Stream, deadline: float) -> Frame:
    """The next frame's head. Raises OSError: WireBrokenError when it can't be one."""
    kind, zero, zero2, request, body_bytes = FRAME.unpack(stream.take(FRAME.size, deadline))
    if zero or zero2 or kind not in _BODY_BYTES:
        raise WireBrokenError("not a frame")
    least, most = _BODY_BYTES[Kind(kind)]
    if not least <= body_bytes <= most:
        raise WireBrokenError(f"a {Kind(kind).name} of {body_bytes} bytes")
    return Frame(Kind(kind), request, body_bytes)


def read_body(stream: Stream, frame: Frame, kind: Kind, deadline: float) -> bytes:
    """The body of a frame that must be of this kind. Raises OSError."""
    if frame.kind is not kind:
        raise WireBrokenError(f"{frame.kind.name} where {kind.name} belongs")
    return stream.take(frame.body_bytes, deadline)


def encode(kind: Kind, request: int, body: bytes = b"") -> bytes:
    """One frame."""
    return FRAME.pack(kind, 0, 0, request, len(body)) + body


def encode_pull(request: int, pull: Pull) -> bytes:
    """A PULL frame."""
    head = PULL_HEAD.pack(pull.deadline_ms, 0, pull.window_bytes)
    return encode(Kind.PULL, request, head + b"".join(pull.keys))


def decode_pull(body: bytes) -> Pull:
    """Raises WireBrokenError."""
    deadline_ms, zero, window_bytes = PULL_HEAD.unpack_from(body)
    keys = split_keys(body[PULL_HEAD.size :])
    if zero or not window_bytes or not deadline_ms:
        raise WireBrokenError("a PULL of nothing")
    return Pull(deadline_ms, window_bytes, keys)


def split_keys(data: bytes) -> list[bytes]:
    """Raises WireBrokenError."""
    if len(data) % KEY_BYTES:
        raise WireBrokenError("keys that are none")
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]


def encode_block(request: int, index: int, header: bytes, payload_bytes: int) -> bytes:
    """A BLOCK frame up to its payload, which comes right behind."""
    body = BLOCK_HEAD.pack(index, len(header), payload_bytes) + header
    return FRAME.pack(Kind.BLOCK, 0, 0, request, len(body) + payload_bytes) + body


def proof(secret: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """What only a holder of the secret can say, for these two nonces and this end."""
    key = hashlib.blake2b(secret, digest_size=32, person=b"wr-peer-key-1").digest()
    said = role + client_nonce + server_nonce
    return hashlib.blake2b(said, digest_size=MAC_BYTES, key=key, person=b"wr-peer-1").digest()


def same(one: bytes, other: bytes) -> bool:
    """In constant time."""
    return hmac.compare_digest(one, other)
