"""What replicas will hold soon: the blocks of requests that were just sent to them.

Closes the window between a choice and the first digest that shows its effect, so that the siblings
of a cold shared prefix follow it. Also the only locality there is for a replica without a digest.
Exact, bounded, and gone after a while, or at once when the request fails.

One promise for each decision: its replica will hold the whole chain. They lie in a radix tree, a
node for each run of blocks that the same promises go through, so that neither a promise nor a
look-up costs more than the places where chains part.
"""

from __future__ import annotations

import heapq

from msgspec import Struct

from kvstore.identity import KEY_BYTES, KeyChain

MAX_PROMISES_PER_REPLICA = 4_096
MAX_PROMISES = 65_536
MAX_KEYS = 1 << 20
"""Of 16 bytes each; what chains share is kept once."""


class _Node:
    """A run of blocks, from the `start`-th of every chain through it.

    `head` is the key of its first block, `end` the depth behind its last one. `held` counts the
    promises through it by slot, `holders` has those slots as bits, `ends` counts the promises whose
    chain ends here."""

    __slots__ = ("children", "end", "ends", "head", "held", "holders", "keys", "parent", "start")

    def __init__(self, parent: _Node | None, start: int, keys: bytes) -> None:
        self.place(parent, start, keys)
        self.children: dict[bytes, _Node] = {}
        self.held: dict[int, int] = {}
        self.holders = 0
        self.ends = 0

    def place(self, parent: _Node | None, start: int, keys: bytes) -> None:
        """Where it is in the tree, and which run it has."""
        self.parent = parent
        self.start = start
        self.keys = keys
        self.head = keys[:KEY_BYTES]
        self.end = start + len(keys) // KEY_BYTES

    def agrees_to(self, chain: KeyChain) -> int:
        """The depth up to which a chain with the same head agrees: where two chains have an equal
        key, all before it is equal too, so the search bisects."""
        keys, data, start = self.keys, chain.data, self.start * KEY_BYTES
        low, high = 1, min(len(keys), len(data) - start) // KEY_BYTES
        probe = high
        while low < high:
            at = (probe - 1) * KEY_BYTES
            if keys[at : at + KEY_BYTES] == data[start + at : start + at + KEY_BYTES]:
                low = probe
            else:
                high = probe - 1
            probe = low + (high - low + 1) // 2
        return self.start + low


class _Promise(Struct):
    replica: str
    leaf: _Node
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
    ) -> None:
        self.dropped_total = 0
        self.version = 0
        self.slots: list[str | None] = []
        self._per_replica = per_replica
        self._in_all = in_all
        self._max_keys = max_keys
        self._keys = 0
        self._root = _Node(None, 0, b"")
        self._promises: dict[str, _Promise] = {}
        self._of_replica: dict[str, dict[str, None]] = {}
        self._slot_of: dict[str, int] = {}
        self._expiries: list[tuple[float, str]] = []
        self._reached: tuple[KeyChain, _Node, int] | None = None

    def __len__(self) -> int:
        """Keys kept."""
        return self._keys

    @property
    def nbytes(self) -> int:
        """Memory of the keys."""
        return self._keys * KEY_BYTES

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
        leaf = node = self._leaf(chain)
        leaf.ends += 1
        bit = 1 << slot
        while node.parent is not None:
            node.held[slot] = node.held.get(slot, 0) + 1
            node.holders |= bit
            node = node.parent
        self._promises[decision_id] = _Promise(replica, leaf, until_s)
        own = self._of_replica[replica]
        own[decision_id] = None
        heapq.heappush(self._expiries, (until_s, decision_id))
        if len(own) > self._per_replica:
            self._drop(next(iter(own)))
        while len(self._promises) > self._in_all or self._keys > self._max_keys:
            self._drop(next(iter(self._promises)))

    def promised(self, chain: KeyChain) -> list[tuple[int, int]]:
        """(leading blocks, slots as bits): who is promised how much of the chain, deepest first,
        each slot once."""
        node, depth = self._search(chain)
        # Who looks a chain up as a rule remembers it next.
        self._reached = chain, node, depth
        found, seen = [], 0
        while node.parent is not None:
            if fresh := node.holders & ~seen:
                found.append((depth, fresh))
                seen = node.holders
            depth, node = node.start, node.parent
        return found

    def forget_decision(self, decision_id: str) -> None:
        """The request failed: what it promised is not coming."""
        promise = self._promises.pop(decision_id, None)
        if promise is not None:
            del self._of_replica[promise.replica][decision_id]
            self._release(promise)

    def forget_replica(self, replica: str) -> None:
        """It left, or began a new life."""
        for decision_id in list(self._of_replica.get(replica, ())):
            self.forget_decision(decision_id)
        if self._of_replica.pop(replica, None) is not None:
            self.slots[self._slot_of.pop(replica)] = None
            self.version += 1

    def expire(self, now_s: float) -> None:
        """Drop what is over."""
        while self._expiries and self._expiries[0][0] <= now_s:
            self.forget_decision(heapq.heappop(self._expiries)[1])

    def _search(self, chain: KeyChain) -> tuple[_Node, int]:
        """The last node on the chain's way, and the depth up to which they agree."""
        data, blocks = chain.data, chain.blocks
        node, depth = self._root, 0
        while depth < blocks:
            child = node.children.get(data[depth * KEY_BYTES : (depth + 1) * KEY_BYTES])
            if child is None:
                break
            node, depth = child, child.agrees_to(chain)
            if depth < child.end:
                break
        return node, depth

    def _leaf(self, chain: KeyChain) -> _Node:
        """The node that ends where the chain ends; made where there is none."""
        if self._reached is not None and self._reached[0] is chain:
            _, node, depth = self._reached
        else:
            node, depth = self._search(chain)
        self._reached = None
        if depth < node.end:
            node = _split(node, depth)
        if depth == chain.blocks:
            return node
        leaf = _Node(node, depth, chain.data[depth * KEY_BYTES :])
        node.children[leaf.head] = leaf
        self._keys += chain.blocks - depth
        return leaf

    def _release(self, promise: _Promise) -> None:
        """Take it off its whole way, and off the tree what nobody else goes through."""
        self._reached = None
        slot, node = self._slot_of[promise.replica], promise.leaf
        node.ends -= 1
        while node.parent is not None:
            node.held[slot] -= 1
            if not node.held[slot]:
                del node.held[slot]
                node.holders &= ~(1 << slot)
            if not node.held:
                del node.parent.children[node.head]
                self._keys -= node.end - node.start
            elif not node.ends and len(node.children) == 1:
                _merge(node)
            node = node.parent
        if len(self._expiries) > 2 * len(self._promises) + 64:
            self._expiries = [(p.until_s, name) for name, p in self._promises.items()]
            heapq.heapify(self._expiries)

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


def _split(node: _Node, depth: int) -> _Node:
    """Cut a node in two; the new one is the upper part, so that promises keep their ends."""
    parent, cut = node.parent, (depth - node.start) * KEY_BYTES
    assert parent is not None
    upper = _Node(parent, node.start, node.keys[:cut])
    upper.held, upper.holders = dict(node.held), node.holders
    node.place(upper, depth, node.keys[cut:])
    upper.children[node.head] = node
    parent.children[upper.head] = upper
    return upper


def _merge(node: _Node) -> None:
    """Put a node in front of its only child, where all its promises go on."""
    parent, (child,) = node.parent, node.children.values()
    assert parent is not None
    child.place(parent, node.start, node.keys + child.keys)
    parent.children[child.head] = child
