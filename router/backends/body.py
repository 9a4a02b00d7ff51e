"""The client's body on its way to a server of another kind: only what must differ is touched.

Values stay the bytes that the client sent: nothing is parsed beyond the names at the top.
"""

from __future__ import annotations

import msgspec

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_options = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_encode = msgspec.json.Encoder().encode
_TRUE = msgspec.Raw(b"true")


def rewrite(body: bytes, model: str, cache_salt: str | None, ask_usage: bool) -> bytes:
    """`body` is a valid request of ours. `ask_usage` adds the usage event to a stream.

    `cache_salt` is ours alone to set: a body that names it was refused before.
    """
    fields = _decoder.decode(body)
    fields["model"] = msgspec.Raw(_encode(model))
    if cache_salt is not None:
        fields["cache_salt"] = msgspec.Raw(_encode(cache_salt))
    if ask_usage:
        fields["stream_options"] = _with_usage(fields.get("stream_options"))
    return _encode(fields)


def _with_usage(options: msgspec.Raw | None) -> msgspec.Raw:
    given = (_options.decode(options) if options is not None else None) or {}
    given["include_usage"] = _TRUE
    return msgspec.Raw(_encode(given))
