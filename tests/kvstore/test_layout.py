"""The memory of a block (K7)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.layout import ALIGN_BYTES, Layout
from tests.kvstore.blocks import LAYOUT

GOLDEN = "d1625bcb5f25921c9539aa53b511c5f4"


def test_K7_golden_fingerprint() -> None:
    assert LAYOUT.fingerprint.hex() == GOLDEN


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"layers": 1, "kv_heads": 3},
        {"kv_heads": 2, "head_dim": 3},
        {"head_dim": 3, "block_tokens": 8},
        {"rope": "default:500000"},
    ],
)
def test_K7_layouts_of_equal_size_are_told_apart(change: dict[str, object]) -> None:
    other = replace(LAYOUT, **change)
    assert other.fingerprint != LAYOUT.fingerprint


def test_layers_lie_apart_and_aligned() -> None:
    assert LAYOUT.layer_bytes == 2 * 4 * 6 * 2
    assert LAYOUT.stride_bytes == 128
    assert LAYOUT.payload_bytes == 3 * 128
    for layer in range(LAYOUT.layers):
        assert LAYOUT.segment(layer).start % ALIGN_BYTES == 0
    assert LAYOUT.segment(2).stop == LAYOUT.payload_bytes


@pytest.mark.parametrize(
    "change",
    [{"dtype": "int3"}, {"layers": 0}, {"layers": 10**6}, {"block_tokens": 0}, {"head_dim": 0}],
)
def test_what_cannot_be_stored_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        replace(LAYOUT, **change)


def test_it_is_made_of_a_hello() -> None:
    assert isinstance(LAYOUT, Layout)
    assert (LAYOUT.layers, LAYOUT.block_tokens, LAYOUT.dtype) == (3, 4, "bfloat16")
