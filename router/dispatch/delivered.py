"""What the reader of one request has been given: where another replica would have to go on.

Every delta on its way to the reader passes through `note`, whole or not at all. Knows nothing of
replicas, attempts or OpenAI's schema.
"""

from __future__ import annotations

from array import array
from functools import partial

import msgspec
from msgspec import Struct, field

from events.output import CoreDelta
from events.request import ChildProgress


class _Child(Struct):
    """`cached_tokens`: as the first replica found it, None before its first delta."""

    output: array[int] = field(default_factory=partial(array, "I"))
    cached_tokens: int | None = None
    finished: bool = False


class Delivered:
    """One record for each of `n` children; bounded by what they may generate."""

    def __init__(self, n: int) -> None:
        self._children = [_Child() for _ in range(n)]

    def note(self, delta: CoreDelta) -> CoreDelta:
        """Record a delta; returns it as the reader gets it: what a second replica found in its
        cache is not what the request found."""
        child = self._children[delta.child]
        child.output.extend(delta.token_ids)
        child.finished = delta.finish is not None
        usage = delta.usage
        if child.cached_tokens is None:
            child.cached_tokens = usage.cached_tokens
        if usage.cached_tokens == child.cached_tokens:
            return delta
        usage = msgspec.structs.replace(usage, cached_tokens=child.cached_tokens)
        return msgspec.structs.replace(delta, usage=usage)

    def progress(self) -> tuple[ChildProgress, ...]:
        """For a request that goes on from here; () when nothing was delivered."""
        if not any(child.output or child.finished for child in self._children):
            return ()
        return tuple(
            ChildProgress(child.output.tobytes(), child.finished) for child in self._children
        )
