"""What tier tests ask of a tier, and of which stores."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from kvstore.tier import Outcome, Tier
from tests.kvstore.conformance.backends import BACKENDS
from tests.kvstore.conformance.blocks import (
    Block,
    reads_into,
    verdict,
)

Seed = Callable[[], int]
WAIT_S = 60.0


def soon(seconds: float = WAIT_S) -> float:
    return time.monotonic() + seconds


def put(tier: Tier, blocks: Sequence[Block], ttl_s: float | None = None) -> Sequence[Outcome]:
    return tier.put([block.write(ttl_s) for block in blocks], soon()).result(WAIT_S)


def get(
    tier: Tier, blocks: Sequence[Block], seconds: float = WAIT_S
) -> tuple[list[str], list[bytearray]]:
    """What a reader makes of each block, and where it landed."""
    rooms = [block.room() for block in blocks]
    outcomes = tier.get(reads_into(blocks, rooms), soon(seconds)).result(seconds + WAIT_S)
    verdicts = [verdict(*each) for each in zip(blocks, outcomes, rooms, strict=True)]
    return verdicts, rooms


def exists(tier: Tier, blocks: Sequence[Block]) -> int:
    return tier.exists_prefix([block.key for block in blocks], soon())


def on(*able: str, writable: bool = False) -> pytest.MarkDecorator:
    """The stores that can all of this."""
    names = [
        pytest.param(name, marks=[pytest.mark.slow] if kind.slow else [])
        for name, kind in sorted(BACKENDS.items())
        if kind.can.issuperset(able) and not (writable and "read_only" in kind.can)
    ]
    return pytest.mark.parametrize("backend", names, indirect=True, scope="module")
