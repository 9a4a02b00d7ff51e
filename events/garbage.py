"""Python's collector of garbage in cycles, in a process that has to answer within milliseconds."""

from __future__ import annotations

import gc

_GARBAGE_OBJECTS = 10_000
"""Made since the last look at the young ones; the default is 700."""


def settle_memory() -> None:
    """What is there now stays: the collector need not walk through it again and again, which would
    hold up a choice or a step now and then. Garbage in cycles is rare, so it may come less often
    too."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE_OBJECTS, 20, 20)
