"""A piece of a rendered conversation, the word between template and tokenizer."""

from __future__ import annotations

from typing import NamedTuple


class Segment(NamedTuple):
    """A marker that the template wrote (`special_id`, `text` is its spelling), or plain text."""

    text: str
    special_id: int | None
