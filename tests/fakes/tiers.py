"""Tiers for a scheduler over the fake runner: blocks as cells, landed when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from replica.sched.plan import ChildId
from replica.sched.tiers import StoredBlock, Wanted

if TYPE_CHECKING:
    from tests.fakes.runner import FakeRunner

Cells = list[tuple[int, int] | None]
GARBAGE = (-7, -7)


class FakeTiers:
    """Keeps what was computed; `open` are the loads under way, with their destination blocks.

    While a load is open its blocks hold garbage: whoever reads or writes them meanwhile is found.
    """

    def __init__(self, runner: FakeRunner) -> None:
        self.kept: dict[tuple[bytes, int, bytes], Cells] = {}
        self.open: dict[ChildId, tuple[Wanted, tuple[int, ...]]] = {}
        self.ahead: list[ChildId] = []
        self.dropped: list[ChildId] = []
        self.uses: list[bytes] = []
        self.landed: Callable[[ChildId, int], None] = lambda child, blocks: None
        self.writing: dict[ChildId, tuple[str, tuple[StoredBlock, ...]]] = {}
        self.written: Callable[[ChildId, int], None] = lambda child, blocks: None
        self._runner = runner

    def look(self, wanted: Wanted) -> None:
        self.ahead.append(wanted.child)

    def worth(self, wanted: Wanted) -> bool:
        return self._names(wanted)[0] in self.kept

    def land(self, wanted: Wanted, blocks: tuple[int, ...]) -> None:
        assert wanted.child not in self.open
        assert len(blocks) == wanted.blocks
        self.open[wanted.child] = wanted, blocks
        for block in blocks:
            self._runner.kv[block] = [GARBAGE] * self._runner.block_tokens

    def drop(self, child: ChildId) -> None:
        self.dropped.append(child)

    def stored(self, block: StoredBlock) -> None:
        name = block.key, block.index, block.tokens
        self.kept[name] = list(self._runner.kv[block.block])

    def used(self, keys: Sequence[bytes]) -> None:
        self.uses += keys

    def write_out(self, child: ChildId, store: str, blocks: tuple[StoredBlock, ...]) -> None:
        assert child not in self.writing
        self.writing[child] = store, blocks

    def wrote(self, child: ChildId, most: int = 1_000) -> int:
        """The terminal event of one write: its blocks are as they were computed, and so many of
        them are in the store."""
        _, blocks = self.writing.pop(child)
        for block in blocks[:most]:
            name = block.key, block.index, block.tokens
            self.kept[name] = list(self._runner.kv[block.block])
        self.written(child, min(most, len(blocks)))
        return min(most, len(blocks))

    def finish(self, child: ChildId, most: int = 1_000) -> int:
        """The terminal event of one load, with at most so many blocks; returns how many came."""
        wanted, blocks = self.open.pop(child)
        count = 0
        for name, block in zip(self._names(wanted)[:most], blocks, strict=False):
            assert self._runner.kv[block] == [GARBAGE] * self._runner.block_tokens
            if name not in self.kept:
                break
            self._runner.kv[block] = list(self.kept[name])
            count += 1
        self.landed(child, count)
        return count

    def _names(self, wanted: Wanted) -> list[tuple[bytes, int, bytes]]:
        """Tests use hashes that collide: the key alone says too little."""
        size = len(wanted.tokens) // wanted.blocks
        return [
            (key, wanted.first + place, wanted.tokens[place * size : (place + 1) * size])
            for place, key in enumerate(wanted.chain[wanted.first :])
        ]

    def finish_all(self) -> None:
        for child in list(self.open):
            self.finish(child)
        for child in list(self.writing):
            self.wrote(child)
