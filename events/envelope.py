"""The envelope of bus messages: who speaks, which life, which generation, which number."""

from __future__ import annotations

import msgspec

from events.errors import WireError

ENVELOPE_VERSION = 1
MAX_BUS_MESSAGE_BYTES = 1024 * 1024


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """`boot` orders the lives of one id. Of a replica, `seq` counts digest deltas within
    `generation`, and in its other messages it is the number of the last delta at that time. Of a
    router, `seq` counts what it tells the other routers, and `generation` is 0.
    """

    version: int
    sender: str
    boot: int
    generation: int
    seq: int
    payload: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def seal(sender: str, boot: int, generation: int, seq: int, payload: msgspec.Struct) -> bytes:
    """A payload struct in its envelope, as bytes."""
    raw = msgspec.Raw(_encoder.encode(payload))
    return _encoder.encode(Envelope(ENVELOPE_VERSION, sender, boot, generation, seq, raw))


def unseal(data: bytes) -> Envelope:
    """Bytes to envelope. Raises WireError when too large, malformed or of another version."""
    if len(data) > MAX_BUS_MESSAGE_BYTES:
        raise WireError(f"bus message of {len(data)} bytes is over the limit")
    try:
        envelope = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise WireError(f"malformed envelope ({type(error).__name__})") from None
    if envelope.version != ENVELOPE_VERSION:
        raise WireError(f"envelope version {envelope.version} is not spoken here")
    return envelope
