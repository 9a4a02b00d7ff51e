"""What is said on kvd's socket, over the arena's own messages. Every value has a bound.

A frame is a u32 length (little endian) and that many bytes of msgpack. The first frame of a user is
a Hello; a Welcome comes back, with the arena's file descriptor beside it. From then on requests are
answered in order; Abort and Release are not answered, and Follow is answered for ever.
"""

from __future__ import annotations

import struct
from typing import Annotated, TypeVar

import msgspec

from events.errors import WireError
from kvstore.arena.messages import MAX_KEYS, ArenaStats, Finished, Opened, Place, Refusal, Want

VERSION = 1
LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 16 << 20
MAX_NAME_CHARS = 64

_Key = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Keys = Annotated[list[_Key], msgspec.Meta(max_length=MAX_KEYS)]
_Places = Annotated[list[Place], msgspec.Meta(max_length=MAX_KEYS)]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Its name comes first."""


class Hello(_Message, frozen=True):
    """Who comes. `name` is for people, such as a replica's id."""

    version: int
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]


class Welcome(_Message, frozen=True):
    """What the file descriptor beside it is. `boot` grows with every start of the daemon."""

    version: int
    boot: int
    slot_bytes: int


class Reserve(_Message, frozen=True):
    """Answered by Reserved."""

    wants: Annotated[list[Want], msgspec.Meta(max_length=MAX_KEYS)]


class Commit(_Message, frozen=True):
    """Answered by Committed."""

    finished: Annotated[list[Finished], msgspec.Meta(max_length=MAX_KEYS)]


class Abort(_Message, frozen=True):
    """Not answered."""

    places: _Places


class Open(_Message, frozen=True):
    """Answered by Leased."""

    keys: _Keys


class Release(_Message, frozen=True):
    """Not answered."""

    places: _Places


class Exists(_Message, frozen=True):
    """Answered by Count."""

    keys: _Keys


class Delete(_Message, frozen=True):
    """Answered by Count."""

    keys: _Keys


class Purge(_Message, frozen=True):
    """All blocks of one owner, or all. Answered by Count."""

    owner: _Key | None


class Pin(_Message, frozen=True):
    """For a time; 0 s ends pins. Answered by Count."""

    keys: _Keys
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Stats(_Message, frozen=True):
    """Answered by Report."""


class Keys(_Message, frozen=True):
    """Readable keys behind `after`. Answered by KeyList."""

    after: Annotated[bytes, msgspec.Meta(max_length=16)]
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_KEYS)]


class Follow(_Message, frozen=True):
    """Answered by Changes from now on: first all that is there, then what comes and goes."""


class Reserved(_Message, frozen=True):
    """A place or a reason for each Want."""

    answers: list[Place | Refusal]


class Committed(_Message, frozen=True):
    """Whether each block is readable now."""

    right: list[bool]


class Leased(_Message, frozen=True):
    """The blocks from the first key on, up to the first hole."""

    opened: list[Opened]


class Count(_Message, frozen=True):
    """How many."""

    count: int


class Report(_Message, frozen=True):
    """The arena's books."""

    boot: int
    uptime_s: float
    stats: ArenaStats


class KeyList(_Message, frozen=True):
    """In order."""

    keys: list[bytes]


class Changes(_Message, frozen=True):
    """Keys that became readable, and keys that ceased to be; none is in both."""

    stored: list[bytes]
    removed: list[bytes]


class Refused(_Message, frozen=True):
    """Why the daemon hangs up."""

    reason: str


Request = (
    Reserve
    | Commit
    | Abort
    | Open
    | Release
    | Exists
    | Delete
    | Purge
    | Pin
    | Stats
    | Keys
    | Follow
)
Reply = Reserved | Committed | Leased | Count | Report | KeyList | Changes | Refused

T = TypeVar("T")
_ENCODER = msgspec.msgpack.Encoder()
_HELLO = msgspec.msgpack.Decoder(Hello)
_WELCOME: msgspec.msgpack.Decoder[Welcome | Refused] = msgspec.msgpack.Decoder(Welcome | Refused)
_REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLY: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def frame(message: _Message) -> bytes:
    """The message with its length before it. Raises WireError when it is too long."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError("a frame is too long")
    return LENGTH.pack(len(body)) + body


def body_bytes(head: bytes | bytearray | memoryview) -> int:
    """How long the frame is that begins with these 4 bytes. Raises WireError."""
    (length,) = LENGTH.unpack_from(head)
    if not 0 < length <= MAX_FRAME_BYTES:
        raise WireError("a frame of a length that is not spoken here")
    return int(length)


def hello_of(body: bytes) -> Hello:
    """Raises WireError."""
    return _decoded(_HELLO, body)


def welcome_of(body: bytes) -> Welcome | Refused:
    """Raises WireError."""
    return _decoded(_WELCOME, body)


def request_of(body: bytes) -> Request:
    """Raises WireError."""
    return _decoded(_REQUEST, body)


def reply_of(body: bytes) -> Reply:
    """Raises WireError."""
    return _decoded(_REPLY, body)


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError("a frame that says nothing known here") from error
