"""What is said of a grammar that can't be used. Never the library's own text: it quotes."""

from __future__ import annotations

import re

from events.errors import CoreError, UserError
from events.grammar import JSON_SCHEMA, REGEX, Grammar

_REASONS = (
    ("Unimplemented keys", "it uses a keyword that can't be enforced: {keys}"),
    ("Unknown format", "it uses a 'format' that can't be enforced"),
    ("regex parse error", "a regular expression in it is invalid or uses a feature that can't be"
     " enforced (look-around, back-references)"),
    ("invalid regex", "a regular expression in it is invalid or uses a feature that can't be"
     " enforced (look-around, back-references)"),
    ("does not exist", "a '$ref' in it points nowhere"),
    ("Resource", "a '$ref' in it points outside of the document"),
    ("Unsatisfiable", "nothing can satisfy it"),
    ("too big", "it is too large"),
    ("too many", "it is too large"),
    ("limit", "it is too large or nested too deeply"),
    ("out of range", "a number in it is too large"),
    ("oneOf", "the alternatives of a 'oneOf' in it can't be told apart; use 'anyOf'"),
    ("Invalid type", "a 'type' in it is unknown"),
    ("schema must be", "a schema in it is neither an object nor a boolean"),
    ("must be", "a keyword in it has a value of the wrong type"),
)  # fmt: skip
_KEYWORD = re.compile(r'"(\$?[A-Za-z]{1,32})"')
_KEYWORDS = frozenset((
    "$anchor", "$dynamicRef", "contains", "contentEncoding", "contentMediaType", "contentSchema",
    "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "maxProperties",
    "minContains", "minProperties", "not", "patternProperties", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
))  # fmt: skip

_NOUNS = {JSON_SCHEMA: "schema", REGEX: "regex"}


def _error(grammar: Grammar, reason: str) -> UserError:
    noun = _NOUNS.get(grammar.kind, "grammar")
    return UserError(
        CoreError(
            status=400,
            message=f"Invalid {noun} for '{grammar.param}': {reason}.",
            param=grammar.param,
            code="invalid_value",
        )
    )


def endless(grammar: Grammar) -> UserError:
    """It requires itself inside itself."""
    return _error(grammar, "it requires itself, so no answer could ever end")


def empty(grammar: Grammar) -> UserError:
    """It allows no first token."""
    return _error(grammar, "it allows no answer at all")


def beyond(grammar: Grammar) -> UserError:
    """What was put out elsewhere doesn't fit, or has ended."""
    message = "The progress goes beyond the grammar."
    return UserError(CoreError(status=400, message=message, param="progress", code="invalid_value"))


def too_costly(grammar: Grammar) -> UserError:
    """It ended the process that tried it out."""
    return _error(grammar, "it is too large or nested too deeply")


def too_deep(grammar: Grammar, levels: int) -> UserError:
    """Whoever follows it goes as deep."""
    return _error(grammar, f"it is too complex: nested more than {levels} levels deep")


def not_json(grammar: Grammar) -> UserError:
    """The source is no JSON."""
    return _error(grammar, "it is not a JSON schema")


def unknown_kind(grammar: Grammar) -> UserError:
    """Of a newer gateway."""
    return _error(grammar, "it is of a kind that is not known here")


def from_library(grammar: Grammar, said: str) -> UserError:
    """`said` is the library's text, of which only the kind is passed on."""
    for sign, reason in _REASONS:
        if sign in said:
            named = sorted(set(_KEYWORD.findall(said)) & _KEYWORDS)
            keys = ", ".join(f"'{name}'" for name in named) or "see the documentation"
            return _error(grammar, reason.format(keys=keys))
    return _error(grammar, "it can't be compiled")
