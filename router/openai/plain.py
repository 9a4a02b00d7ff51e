"""The chat request that nearly everybody sends, read in one go: plain texts, few parameters.

Decoding, types and bounds are one step of msgspec's, over what is left where the texts themselves
were cut out. Whatever is not quite so is left to the
readers (None), which accept more and say what is wrong; what is accepted here means the same there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from router.openai.body import SMALL_BYTES
from router.openai.contents import Written, contents_of
from router.openai.fields import MAX_INTEGER
from router.openai.quotes import quotes_in
from router.openai.schema import ChatRequest, Controls, Limits

_Tokens = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]


class _Message(Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str


class _Options(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool


class _Request(Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    messages: Annotated[list[_Message], Meta(min_length=1)]
    stream: bool | UnsetType = UNSET
    stream_options: _Options | UnsetType = UNSET
    max_tokens: _Tokens | UnsetType = UNSET
    max_completion_tokens: _Tokens | UnsetType = UNSET
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | UnsetType = UNSET
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | UnsetType = UNSET
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | UnsetType = UNSET

    def strings(self) -> int:
        """How many strings the body holds, names included, where no name is given twice."""
        given = (self.stream, self.stream_options, self.max_tokens, self.max_completion_tokens)
        absent = (*given, self.temperature, self.top_p, self.seed).count(UNSET)
        return 10 - absent + 4 * len(self.messages) + (self.stream_options is not UNSET)


_decode = msgspec.json.Decoder(_Request).decode


def read_plain(body: bytes, limits: Limits) -> ChatRequest | None:
    """The request, or None for the readers."""
    if len(body) > SMALL_BYTES:
        return None
    found = contents_of()(body)
    bare = body if found is None else found.reduced
    try:
        asked = _decode(bare)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if asked.model not in limits.models or len(asked.messages) > limits.max_messages:
        return None
    max_tokens, newer, options = asked.max_tokens, asked.max_completion_tokens, asked.stream_options
    if newer is not UNSET:
        if max_tokens is not UNSET:
            return None
        max_tokens = newer
    stream = asked.stream is True
    if (options is not UNSET and not stream) or 2 * asked.strings() != quotes_in()(bare):
        return None
    messages: Sequence[dict[str, Any]]
    if found is None:
        messages = [{"role": each.role, "content": each.content} for each in asked.messages]
    else:  # of each message one, and of nothing else
        messages = Written(body, tuple([each.role for each in asked.messages]), found.spans)
    return ChatRequest(
        model=asked.model,
        messages=messages,
        controls=Controls(
            max_tokens=None if max_tokens is UNSET else max_tokens,
            seed=None if asked.seed is UNSET else asked.seed,
            temperature=1.0 if asked.temperature is UNSET else asked.temperature,
            top_p=1.0 if asked.top_p is UNSET else asked.top_p,
        ),
        stream=stream,
        include_usage=options is not UNSET and options.include_usage,
    )
