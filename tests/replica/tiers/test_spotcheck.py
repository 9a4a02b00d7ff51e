"""What a computed block tells of the one that was loaded in its place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstore.errors import Reason
from kvstore.layout import Layout
from kvstore.level import Level
from kvstore.verify import Verifier
from replica.tiers.spotcheck import SpotCheck
from tests.fakes.memory_tier import MemoryTier
from tests.kvstore.blocks import CLUSTER_KEY

DEEP = Layout("bfloat16", 30, 3, 64, 16, "halves theta=100000")
KEY = b"k" * 16
Values = np.ndarray


def block() -> Values:
    """[layers][K, V][tokens][heads][dim], each layer's of another size, as in a model."""
    shape = (DEEP.layers, 2, DEEP.block_tokens, DEEP.kv_heads, DEEP.head_dim)
    sizes = np.linspace(0.05, 4.0, 2 * DEEP.layers).reshape(DEEP.layers, 2, 1, 1, 1)
    return np.random.default_rng(1).normal(size=shape).astype(np.float32) * sizes


def payload(values: Values) -> memoryview:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
    return memoryview(bits.astype(np.uint16).tobytes())


def compared(loaded: Values, computed: Values) -> tuple[SpotCheck, Level]:
    spot = SpotCheck(DEEP, 1)
    level = Level(MemoryTier(1 << 20), DEEP, Verifier(CLUSTER_KEY, DEEP), bytes(32))
    spot.withhold(KEY, payload(loaded), level)
    spot.compare(KEY, payload(computed))
    assert spot.checked == 1
    return spot, level


def swapped(values: Values, axis: int) -> Values:
    """The fifth and the sixth of them have changed places."""
    order = [*range(values.shape[axis])]
    order[4:6] = [5, 4]
    return np.take(values, order, axis)


def one_layer(values: Values, change: Callable[[Values], Values]) -> Values:
    changed = values.copy()
    changed[7] = change(values[7])
    return changed


FAULTS: dict[str, Callable[[Values], Values]] = {
    "values before keys": lambda values: values[:, ::-1],
    "two layers": lambda values: swapped(values, 0),
    "two tokens": lambda values: swapped(values, 2),
    "values before keys in one layer": lambda values: one_layer(values, lambda one: one[::-1]),
    "no values in one layer": lambda values: one_layer(
        values, lambda one: one * [[[[1]]], [[[0]]]]
    ),
    "no number": lambda values: one_layer(values, lambda one: one * np.nan),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_K7_what_is_wrong_in_one_place_only_is_found(fault: str) -> None:
    values = block()
    spot, level = compared(FAULTS[fault](values), values)
    assert spot.mismatches == 1
    assert level.counts.refused == {Reason.RECOMPUTED: 1}
    assert not level.usable


def test_what_was_rounded_otherwise_is_the_same() -> None:
    values = block()
    noise = 1 + 0.05 * np.random.default_rng(2).normal(size=values.shape)
    spot, level = compared(values * noise, values)
    assert spot.mismatches == 0
    assert level.usable
