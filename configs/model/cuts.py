"""Where a text may be cut so that the ids of its pieces, joined, are the ids of the whole.

Between a letter and a space that a letter follows: no pattern below matches across that place, none
looks back, and a look ahead from the left ends before it. Merges never leave a match. So whatever
stands on one side makes no difference to the ids of the other. The same holds behind a digit where
each digit stands alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_WORDS = WORDS % r"\p{N}{1,3}"
QWEN_WORDS = WORDS % r"\p{N}"

_LETTER = "A-Za-zÀ-ÖØ-öø-ɏА-я"
WORDS_ONLY = re.compile(f"[{_LETTER}](?= [{_LETTER}])")
_DIGIT = re.compile("[0-9]")
DIGITS_TOO = re.compile(f"{WORDS_ONLY.pattern}|[0-9]")


def cut(text: str, chars: int, place: re.Pattern[str] = WORDS_ONLY) -> Iterator[str]:
    """Pieces of `chars` characters or a little more, the last one of less, each ending with a
    `place`. Texts with an equal beginning have equal pieces up to where they part."""
    start, end = 0, len(text)
    while end - start > chars:
        found = place.search(text, start + chars - 1)
        if found is None:
            break
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


def places(spec: Mapping[str, Any]) -> re.Pattern[str] | None:
    """Where the tokenizer that a tokenizer.json describes is known to break, if anywhere."""
    stages = _stages(spec.get("pre_tokenizer"))
    if not _can_cut(spec, stages):
        return None
    added = spec.get("added_tokens") or ()
    apart = any(map(_sets_digits_apart, stages))
    apart = apart and not any(_DIGIT.search(token["content"]) for token in added)
    return DIGITS_TOO if apart else WORDS_ONLY


def _can_cut(spec: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> bool:
    return (
        (spec.get("normalizer") or {"type": "NFC"}).get("type") == "NFC"
        and spec["model"].get("dropout") is None
        and all(map(_harmless, stages))
        and any(map(_breaks, stages))
        and not any(map(_reaches_over, spec.get("added_tokens") or ()))
    )


def _reaches_over(token: Mapping[str, Any]) -> bool:
    """It holds such a place, takes the space behind its last letter with it, or is only one where
    no word stands before it."""
    content = token["content"]
    takes_space = token.get("rstrip") and WORDS_ONLY.search(f"{content} a") is not None
    holds_place = WORDS_ONLY.search(content) is not None
    return bool(takes_space or token.get("single_word")) or holds_place


def _stages(part: Any) -> list[Mapping[str, Any]]:
    if not isinstance(part, Mapping):
        return []
    if part.get("type") == "Sequence":
        return [stage for inner in part.get("pretokenizers", ()) for stage in _stages(inner)]
    return [part]


def _breaks(stage: Mapping[str, Any]) -> bool:
    """It cuts there, and what lies beyond makes no difference to it."""
    if stage.get("type") == "ByteLevel":
        return bool(stage.get("use_regex", True)) and _harmless(stage)
    return (
        stage.get("type") == "Split"
        and stage.get("behavior") == "Isolated"
        and not stage.get("invert")
        and stage.get("pattern") in ({"Regex": LLAMA_WORDS}, {"Regex": QWEN_WORDS})
    )


def _sets_digits_apart(stage: Mapping[str, Any]) -> bool:
    """Each of them is a match of its own."""
    if stage.get("type") == "Digits":
        return bool(stage.get("individual_digits"))
    return stage.get("type") == "Split" and stage.get("pattern") == {"Regex": QWEN_WORDS}


def _harmless(stage: Mapping[str, Any]) -> bool:
    """What lies beyond makes no difference to it."""
    if stage.get("type") == "ByteLevel":
        return not stage.get("add_prefix_space", True)
    return stage.get("type") == "Digits" or _breaks(stage)
