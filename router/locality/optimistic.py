"""What replicas will hold soon: the blocks of requests that were just sent to them.

Closes the window between a choice and the first digest that shows its effect, so that the siblings
of a cold shared prefix follow it. Also the only locality there is for a replica without a digest.
Exact, bounded, and gone after a while, or at once when the request fails.

One promise for each decision: its replica will hold the whole chain.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from configs.native import address
from kvstore.identity import KEY_BYTES, KeyChain
from router.locality.planes import NOBODY
from router.locality.promises import Leaf, PromiseTree, promise_tree

MAX_PROMISES_PER_REPLICA = 4_096
MAX_PROMISES = 65_536
MAX_KEYS = 1 << 20
"""Of 16 bytes each; what chains share is kept once."""


class PromiseSeats(NamedTuple):
    """Where promises are looked up for the rows of one board: `rows` by slot, -1 for none. Good as
    long as the entries are at `version`. `addresses`: the same for a native kernel, int64; `at`:
    where these lie."""

    version: int
    tree: PromiseTree
    rows: np.ndarray
    addresses: np.ndarray
    at: int

    def count_in(self, chain: KeyChain, depths: np.ndarray) -> None:
        """The leading blocks that are promised: `depths`, int32 by row, become no less."""
        self.tree.promised(chain.data, chain.blocks, self.rows, depths)


class _Promise(Struct):
    replica: str
    leaf: Leaf
    slot: int
    until_s: float


class OptimisticEntries:
    """Promises by decision. Times are monotonic; what is over counts until `expire` is called.

    A replica has a slot from its first promise to `forget_replica`; `slots` tells whose it is, and
    `version` changes with it."""

    def __init__(
        self,
        per_replica: int = MAX_PROMISES_PER_REPLICA,
        in_all: int = MAX_PROMISES,
        max_keys: int = MAX_KEYS,
        tree: PromiseTree | None = None,
    ) -> None:
        self.dropped_total = 0
        self.version = 0
        self.slots: list[str | None] = []
        self._per_replica = per_replica
        self._in_all = in_all
        self._max_keys = max_keys
        self._tree = promise_tree() if tree is None else tree
        self._promises: dict[str, _Promise] = {}
        self._of_replica: dict[str, dict[str, None]] = {}
        self._slot_of: dict[str, int] = {}
        self._expiries: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Keys kept."""
        return self._tree.kept[0]

    @property
    def nbytes(self) -> int:
        """Memory of the keys."""
        return self._tree.kept[0] * KEY_BYTES

    @property
    def max_bytes(self) -> int:
        """What they may take at most."""
        return self._max_keys * KEY_BYTES

    @property
    def promises(self) -> int:
        """How many stand."""
        return len(self._promises)

    def remember(self, replica: str, decision_id: str, chain: KeyChain, until_s: float) -> None:
        """All blocks of the chain are there, or on their way."""
        if not chain.blocks or decision_id in self._promises:
            return
        slot = self._slot_of.get(replica)
        if slot is None:
            slot = self._new_slot(replica)
        leaf = self._tree.promise(chain.data, chain.blocks, slot)
        self._promises[decision_id] = _Promise(replica, leaf, slot, until_s)
        own = self._of_replica[replica]
        own[decision_id] = None
        heapq.heappush(self._expiries, (until_s, decision_id))
        if len(own) > self._per_replica:
            self._drop(next(iter(own)))
        while len(self._promises) > self._in_all or self._tree.kept[0] > self._max_keys:
            self._drop(next(iter(self._promises)))

    def seats(self, rows: Mapping[str, int]) -> PromiseSeats:
        """For look-ups: where the depth of each replica goes."""
        at = np.array(
            [rows.get(replica or "", NOBODY) for replica in self.slots] or [NOBODY], np.int32
        )
        look_up, tree = self._tree.at or (0, 0)
        addresses = np.array((look_up, tree, address(at)), np.int64)
        return PromiseSeats(self.version, self._tree, at, addresses, address(addresses))

    def forget_decision(self, decision_id: str) -> None:
        """The request failed: what it promised is not coming."""
        if self._take_back(decision_id) and len(self._expiries) > 2 * len(self._promises) + 64:
            self._expiries = [(p.until_s, name) for name, p in self._promises.items()]
            heapq.heapify(self._expiries)

    def forget_replica(self, replica: str) -> None:
        """It left, or began a new life."""
        for decision_id in list(self._of_replica.get(replica, ())):
            self.forget_decision(decision_id)
        if self._of_replica.pop(replica, None) is not None:
            self.slots[self._slot_of.pop(replica)] = None
            self.version += 1

    def expire(self, now_s: float) -> None:
        """Drop what is over."""
        expiries, pop, take_back = self._expiries, heapq.heappop, self._take_back
        while expiries and expiries[0][0] <= now_s:
            take_back(pop(expiries)[1])

    def _take_back(self, decision_id: str) -> bool:
        """Whether it stood."""
        promise = self._promises.pop(decision_id, None)
        if promise is None:
            return False
        del self._of_replica[promise.replica][decision_id]
        self._tree.take_back(promise.leaf, promise.slot)
        return True

    def _new_slot(self, replica: str) -> int:
        if None not in self.slots:
            self.slots.append(None)
        slot = self._slot_of[replica] = self.slots.index(None)
        self.slots[slot] = replica
        self._of_replica[replica] = {}
        self.version += 1
        return slot

    def _drop(self, decision_id: str) -> None:
        self.dropped_total += 1
        self.forget_decision(decision_id)
