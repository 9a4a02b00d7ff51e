"""A fake runner's blocks as bytes: its tokens as keys, its positions as values."""

from __future__ import annotations

import numpy as np

from events.load import KVLayout
from kvstore.layout import Layout
from tests.fakes.runner import FakeRunner


def fake_layout(block_tokens: int) -> KVLayout:
    """One layer, one head, one number for each token."""
    return KVLayout(
        dtype="float32", layers=1, kv_heads=1, head_dim=1, block_tokens=block_tokens, rope="fake"
    )


class FakeMover:
    """A `BlockMover` that remembers which blocks it moved."""

    def __init__(self, runner: FakeRunner, layout: KVLayout) -> None:
        self.gathered: list[int] = []
        self.scattered: list[int] = []
        self._runner = runner
        self._tokens = layout.block_tokens
        self._bytes = Layout.of(layout).layer_bytes

    def gather(self, block: int, into: memoryview) -> None:
        cells = [cell or (-1, -1) for cell in self._runner.kv[block]]
        values = np.array(cells, dtype="<i4").T.astype("<f4")
        into[:] = values.tobytes().ljust(len(into), b"\0")
        self.gathered.append(block)

    def scatter(self, payload: memoryview, block: int) -> None:
        values = np.frombuffer(payload[: self._bytes], dtype="<f4").reshape(2, self._tokens)
        pairs = values.astype(int).T.tolist()
        self._runner.kv[block] = [(token, position) for token, position in pairs]
        self.scattered.append(block)
