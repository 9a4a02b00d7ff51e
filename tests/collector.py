"""What is freed without the cyclic collector: in steady state it should have next to nothing to do,
for what it finds late is memory, and finding it holds everybody up."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collector() -> Iterator[None]:
    """It doesn't come by meanwhile."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
