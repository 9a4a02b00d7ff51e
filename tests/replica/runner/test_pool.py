"""The pool's memory."""

from __future__ import annotations

import torch

from replica.runner.pool import KVPool


def test_every_page_begins_with_a_cache_line_and_is_zero() -> None:
    pool = KVPool(
        layers=2,
        blocks=3,
        block_tokens=16,
        kv_heads=3,
        head_dim=64,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    for cache in pool.layers:
        for pages in (cache.keys, cache.values):
            assert pages.shape == (4, 16, 3, 64)
            assert all(page.data_ptr() % 64 == 0 for page in pages)
            assert not pages.any()
