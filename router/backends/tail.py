"""What the gateway has to know of a plain answer that it does not parse: its last bytes say it."""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass

from router.backends.nesting import Nesting

KEPT_BYTES = 32 * 1024

_USAGE = re.compile(rb'"usage"\s*:\s*(?=\{)')
"""Quotes inside of a JSON string are escaped: it does not match what a model wrote."""

_json = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ToldUsage:
    """Token counts as the server told them; None where it did not."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


class Tail:
    """One plain answer going by, every byte of it passed on; as router.backends.events.Events."""

    keeps_alive = False
    failed = False
    broken = False

    def __init__(self, measured: bool = True) -> None:
        """`measured`: the server tells where the answer ends. Where neither a length nor chunks do,
        to hang up is the end, and may be a cut behind any brace."""
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._nesting = None if measured else Nesting()

    def feed(self, data: bytes) -> bytes:
        """All of it."""
        if self._nesting is not None:
            self._nesting.feed(data)
        kept = data[-KEPT_BYTES:]
        self._kept.append(kept)
        self._kept_bytes += len(kept)
        while self._kept_bytes - len(self._kept[0]) >= KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft())
        return data

    def rest(self) -> bytes:
        """Nothing is held."""
        return b""

    @property
    def complete(self) -> bool:
        """Whether the answer came to its proper end: the last brace of JSON. Where the server does
        not tell the end, it must close all that was opened before."""
        if self._nesting is not None and not self._nesting.closed:
            return False
        return b"".join(self._kept)[-256:].rstrip().endswith(b"}")

    def usage(self) -> ToldUsage | None:
        """The last usage that was told."""
        kept = b"".join(self._kept)
        start = max((match.end() for match in _USAGE.finditer(kept)), default=-1)
        if start < 0:
            return None
        try:
            found, _ = _json.raw_decode(kept[start:].decode(errors="replace"))
            return told_usage(found)
        except (ValueError, RecursionError):
            return None


def told_usage(found: object) -> ToldUsage | None:
    """As OpenAI's `usage` says it; None where it is none."""
    if not isinstance(found, dict):
        return None
    details = found.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return ToldUsage(
        _count(found.get("prompt_tokens")) or 0,
        _count(found.get("completion_tokens")) or 0,
        _count(cached),
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 2**31 else None
