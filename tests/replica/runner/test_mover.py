"""Blocks of the pool as bytes: in the store's layout, and back without a changed bit."""

from __future__ import annotations

import pytest
import torch

from kvstore.layout import Layout
from replica.runner.mover import PoolMover
from replica.runner.pool import KVPool


def pool_of(dtype: torch.dtype, head_dim: int) -> KVPool:
    pool = KVPool(
        layers=3,
        blocks=5,
        block_tokens=4,
        kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    pool.kv.copy_(torch.randn(pool.kv.shape, generator=torch.Generator().manual_seed(1)))
    return pool


def layout_of(dtype: str, head_dim: int) -> Layout:
    return Layout(dtype, layers=3, kv_heads=2, head_dim=head_dim, block_tokens=4, rope="r")


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [8, 3])
def test_a_block_goes_out_and_comes_back_elsewhere(name: str, head_dim: int) -> None:
    layout, pool = layout_of(name, head_dim), pool_of(getattr(torch, name), head_dim)
    mover, payload = PoolMover(pool, layout), bytearray(b"\xff" * layout.payload_bytes)
    before = pool.kv.clone()
    mover.gather(2, memoryview(payload))
    mover.scatter(memoryview(payload), 4)
    assert torch.equal(pool.kv[:, :, 4], before[:, :, 2])
    assert torch.equal(pool.kv[:, :, :4], before[:, :, :4])
    assert torch.equal(pool.layers[1].values[4], before[1, 1, 2])
    for layer in range(layout.layers):
        segment = payload[layout.segment(layer)]
        values = before[layer, :, 2].contiguous().view(torch.uint8).numpy().tobytes()
        assert segment[: layout.layer_bytes] == values
        assert not any(segment[layout.layer_bytes :])


@pytest.mark.parametrize("other", [layout_of("bfloat16", 8), layout_of("float32", 4)])
def test_another_layout_is_refused(other: Layout) -> None:
    with pytest.raises(ValueError, match="layout"):
        PoolMover(pool_of(torch.float32, 8), other)
