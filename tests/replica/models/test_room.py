"""Where weights lie."""

from __future__ import annotations

import torch

from replica.models.room import Room


def test_pieces_are_zeros_that_share_nothing_and_begin_at_a_cache_line() -> None:
    room = Room()
    like = [torch.ones(3, 90_001, dtype=torch.bfloat16), torch.ones(7, 5), torch.ones(5 << 21)]
    pieces = [room.zeros_like(each) for each in like * 2]
    for value, (piece, each) in enumerate(zip(pieces, like * 2, strict=True), 1):
        assert piece.dtype == each.dtype
        assert piece.shape == each.shape
        assert piece.data_ptr() % 64 == 0
        assert not piece.any()
        piece.fill_(value)
    assert all((piece == value).all() for value, piece in enumerate(pieces, 1))
