"""The block pool: what each of the n KV blocks is used for. Knows ids only: no tokens, no keys.

A block is in exactly one state, and every change names the state that it must come from, so that a
second release is an error and not a corruption:

    FREE > PRIVATE (one writer) > LEASED (published, refs >= 1) <> CACHED (published, refs = 0)

Whatever is freed while a plan is in flight stays FENCED until that plan is committed.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from events.errors import InvariantError


class BlockState(IntEnum):
    """What a block is used for."""

    FREE = 0
    PRIVATE = 1
    LEASED = 2
    CACHED = 3
    FENCED = 4


_CACHED, _LEASED = int(BlockState.CACHED), int(BlockState.LEASED)
"""For what goes over a whole prefix: there arrays are used, for thousands of blocks at once."""


class BlockPool:
    """`total_blocks` blocks with ids 0 to total_blocks - 1; the runner's dump block is not ours."""

    def __init__(self, total_blocks: int) -> None:
        self.total_blocks = total_blocks
        self._states = bytearray(total_blocks)
        self._refs = array("i", [0]) * total_blocks
        self._states_view = np.frombuffer(self._states, np.uint8)
        self._refs_view = np.frombuffer(self._refs, np.int32)
        self._generations = [0] * total_blocks
        self._counts = [total_blocks, 0, 0, 0, 0]
        self._free = list(range(total_blocks - 1, -1, -1))
        self._fenced: deque[tuple[int, int]] = deque()
        self._planned = 0
        self._committed = 0

    def count(self, state: BlockState) -> int:
        """Blocks in `state`."""
        return self._counts[state]

    def state(self, block: int) -> BlockState:
        """What `block` is used for."""
        return BlockState(self._states[block])

    def refs(self, block: int) -> int:
        """Users of a block: 1 for PRIVATE, 1 or more for LEASED, else 0."""
        return self._refs[block]

    def sole(self, blocks: Sequence[int]) -> int:
        """How many of the blocks have one user. For long tables: no Python code runs per block."""
        return list(map(self._refs.__getitem__, blocks)).count(1)

    def generation(self, block: int) -> int:
        """How often the block was taken: while it stays the same, so do a published block's bytes.

        May be read on any thread, before and after a copy of the bytes.
        """
        return self._generations[block]

    def take(self, count: int) -> list[int]:
        """`count` blocks, FREE to PRIVATE. Raises InvariantError when there are fewer."""
        if count > len(self._free):
            raise InvariantError(f"{count} blocks wanted, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._move(block, BlockState.FREE, BlockState.PRIVATE)
            self._refs[block] = 1
            self._generations[block] += 1
        return taken

    def publish(self, block: int) -> None:
        """PRIVATE to LEASED: its writer becomes its first reader."""
        self._move(block, BlockState.PRIVATE, BlockState.LEASED)

    def share(self, blocks: Sequence[int]) -> list[int]:
        """One more reader of each of these published blocks; the places of those that had none."""
        places = np.array(blocks, np.intp)
        readers = self._refs_view[places]
        idle = np.flatnonzero(readers == 0)
        self._expect_all(blocks, np.where(readers, _LEASED, _CACHED), places)
        self._refs_view[places] = readers + 1
        self._states_view[places] = _LEASED
        self._counts[_CACHED] -= len(idle)
        self._counts[_LEASED] += len(idle)
        return idle.tolist()

    def unshare(self, blocks: Sequence[int]) -> list[int]:
        """One reader less of each; the places of those that have none now: LEASED to CACHED."""
        places = np.array(blocks, np.intp)
        self._expect_all(blocks, _LEASED, places)
        readers = self._refs_view[places] - 1
        idle = np.flatnonzero(readers == 0)
        self._refs_view[places] = readers
        self._states_view[places[idle]] = _CACHED
        self._counts[_LEASED] -= len(idle)
        self._counts[_CACHED] += len(idle)
        return idle.tolist()

    def free(self, block: int) -> None:
        """PRIVATE or CACHED to FREE, by way of FENCED while a plan is in flight."""
        state = self.state(block)
        if state not in (BlockState.PRIVATE, BlockState.CACHED):
            raise InvariantError(f"block {block} can't be freed: it is {state.name}")
        self._refs[block] = 0
        if self._planned > self._committed:
            self._move(block, state, BlockState.FENCED)
            self._fenced.append((self._planned, block))
        else:
            self._move(block, state, BlockState.FREE)
            self._free.append(block)

    def reclaim(self, block: int) -> None:
        """CACHED to FREE at once: rows in flight hold their blocks, so none reads this one."""
        self._move(block, BlockState.CACHED, BlockState.FREE)
        self._free.append(block)

    def raise_fence(self, plan_id: int) -> None:
        """A plan leaves for execution: what is freed from now on may still be read by it."""
        if plan_id <= self._planned:
            raise InvariantError(f"plan {plan_id} comes after plan {self._planned}")
        self._planned = plan_id

    def lower_fence(self, plan_id: int) -> None:
        """The plan is over, well or failed: what was freed during it is free now."""
        if not self._committed < plan_id <= self._planned:
            raise InvariantError(f"plan {plan_id} is not in flight")
        self._committed = plan_id
        while self._fenced and self._fenced[0][0] <= plan_id:
            _, block = self._fenced.popleft()
            self._move(block, BlockState.FENCED, BlockState.FREE)
            self._free.append(block)

    def free_ids(self) -> list[int]:
        """The free list, for the invariant check."""
        return list(self._free)

    def _expect(self, block: int, state: BlockState) -> None:
        if self._states[block] != state:
            found = self.state(block).name
            raise InvariantError(f"block {block} is {found}, expected {state.name}")

    def _expect_all(
        self, blocks: Sequence[int], states: np.ndarray | int, places: np.ndarray
    ) -> None:
        """`places`: the blocks as an array."""
        wrong = self._states_view[places] != states
        if wrong.any():
            block = blocks[int(wrong.argmax())]
            raise InvariantError(f"block {block} is {self.state(block).name}, shared or not")

    def _move(self, block: int, source: BlockState, target: BlockState) -> None:
        self._expect(block, source)
        self._states[block] = target
        self._counts[source] -= 1
        self._counts[target] += 1
