"""Encoding of the frames: msgpack with typed decoding and a size limit; nothing else is spoken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from events.errors import WireError
from events.output import CoreDelta, ReplicaFrame
from events.request import MAX_LINK_FRAME_BYTES, RouterFrame

T = TypeVar("T")


def plain(value: Any) -> list[Any]:
    """What msgspec doesn't know: sequences whose items are made when they are first read."""
    if isinstance(value, Sequence):
        return list(value)
    raise NotImplementedError(type(value).__name__)


_encoder = msgspec.msgpack.Encoder(enc_hook=plain)
_router_frames: msgspec.msgpack.Decoder[RouterFrame] = msgspec.msgpack.Decoder(RouterFrame)
_replica_frames: msgspec.msgpack.Decoder[ReplicaFrame] = msgspec.msgpack.Decoder(ReplicaFrame)
_deltas: msgspec.msgpack.Decoder[CoreDelta] = msgspec.msgpack.Decoder(CoreDelta)


def encode(message: msgspec.Struct | tuple[msgspec.Struct, ...]) -> bytes:
    """Message, or messages of one kind, to bytes."""
    return _encoder.encode(message)


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview, limit_bytes: int) -> T:
    """Bytes to a typed message. Raises WireError on too large or malformed input."""
    if len(data) > limit_bytes:
        raise WireError(f"frame of {len(data)} bytes is over the limit of {limit_bytes}")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        # The error's own text may quote the payload: only its kind is passed on.
        raise WireError(f"malformed frame ({type(error).__name__})") from None


def decode_router_frame(data: bytes) -> RouterFrame:
    """A frame that a router sent. Raises WireError."""
    return decode(_router_frames, data, MAX_LINK_FRAME_BYTES)


def decode_replica_frame(data: bytes) -> ReplicaFrame:
    """A frame that a replica sent. Raises WireError."""
    return decode(_replica_frames, data, MAX_LINK_FRAME_BYTES)


def decode_delta(data: bytes | memoryview) -> CoreDelta:
    """One delta of a step's frame. Raises WireError."""
    return decode(_deltas, data, MAX_LINK_FRAME_BYTES)
