"""The form that an answer must have, as it travels from the gateway to the engine."""

from __future__ import annotations

import msgspec

JSON_SCHEMA = "json_schema"
REGEX = "regex"
LARK = "lark"
KINDS = (JSON_SCHEMA, REGEX, LARK)

MAX_GRAMMAR_BYTES = 256 * 1024

GRAMMAR = "grammar"
"""The word in a hello of a replica that heeds `SamplingParams.grammar`."""


class Grammar(msgspec.Struct, frozen=True):
    """`source` is a JSON schema, a regex that the whole answer matches, or a grammar in
    llguidance's dialect of Lark, as `kind` says. `param` is what its author called it, for error
    messages."""

    kind: str
    source: str
    param: str = "response_format"
