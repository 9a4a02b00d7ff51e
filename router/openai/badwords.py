"""Words that must not appear, as the ids that would spell them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

Encode = Callable[[str], Sequence[int]]


def spellings(words: Iterable[str], encode: Encode) -> tuple[tuple[int, ...], ...]:
    """Each word at the beginning of a text, and behind a blank where its ids are others then.

    Other ways to cut a word into tokens are not looked for, as in vLLM.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        first, spaced = (tuple(encode(prefix + word.lstrip())) for prefix in ("", " "))
        if not first:
            continue  # no token spells it
        found[first] = None
        if spaced[-len(first) :] != first:
            found[spaced] = None
    return tuple(found)
