"""The prefix cache: published blocks as a tree of nodes, found by key, trusted by content.

A hit needs three things: the key, the token ids, and the link to the very node that matched the
block before. Were two keys ever to collide, the second block simply is not published.

A node is one logical block; `copies` are the physical blocks that hold it. Two requests may compute
the same block at once: both copies serve their owners, and the surplus one is freed when its last
reader leaves. The journal hears of a node's first copy and of the loss of its last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from configs.schema import Eviction
from events.errors import InvariantError
from replica.cache.idle import IdleNodes
from replica.cache.journal import Journal
from replica.cache.node import Node
from replica.cache.pool import BlockPool, BlockState


class CacheWatcher(Protocol):
    """Told of each block with its tokens, on the engine thread: must return at once."""

    def stored(self, key: bytes, parent: bytes | None, tokens: bytes, adapter: str) -> None:
        """The block's first copy is there; `adapter` is what it was computed with, or empty."""

    def removed(self, key: bytes) -> None:
        """Its last copy is gone."""


class Lease:
    """The longest cached prefix of one request, locked. Leaving the `with` unlocks what was not
    taken. Only what is locked can be counted on, so: look up, then check what is left, then take.
    """

    def __init__(self, cache: PrefixCache, nodes: list[Node], blocks: list[int]) -> None:
        self._cache = cache
        self.nodes = nodes
        self.blocks = blocks
        self._open = True

    def __len__(self) -> int:
        return len(self.nodes)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self._close()
            self._cache.release(self.blocks)

    def take(self, tenant: str, again: bool = False) -> tuple[list[int], list[Node]]:
        """Blocks and nodes now belong to the caller, who releases the blocks.

        `again`: a request finds its own blocks after a preemption, which is no reuse.
        """
        self._close()
        self._cache.used(self.nodes, tenant, again)
        return self.blocks, self.nodes

    def _close(self) -> None:
        if not self._open:
            raise InvariantError("a lease ends once")
        self._open = False
        self._cache.open_leases -= 1


class PrefixCache:
    """Owns the pool: every block comes from `allocate` or a lease and goes back by `release`."""

    def __init__(
        self,
        pool: BlockPool,
        journal: Journal,
        block_tokens: int,
        eviction: Eviction = "segmented",
        shares: bool = True,
    ) -> None:
        """`shares` false: nothing is ever published or found; blocks are private."""
        self.pool = pool
        self.journal = journal
        self.open_leases = 0
        self.collisions = 0
        self.watcher: CacheWatcher | None = None
        self.parked: list[int] = []
        self.shares = shares
        self.block_bytes = 4 * block_tokens
        self._nodes: dict[bytes, Node] = {}
        self._owners: dict[int, Node] = {}
        self._idle = IdleNodes(eviction, pool.total_blocks)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give now: free ones and cached ones that nobody uses."""
        return self.pool.count(BlockState.FREE) + self.pool.count(BlockState.CACHED)

    def match(self, keys: Sequence[bytes], tokens: bytes, limit: int) -> Node | None:
        """The last of the leading blocks that are cached: a hint, nothing is locked."""
        found = self._match(keys, tokens, limit, None)
        return found[-1] if found else None

    def lookup(
        self, keys: Sequence[bytes], tokens: bytes, limit: int, found: Node | None = None
    ) -> Lease:
        """Lock the longest cached prefix of at most `limit` blocks.

        `tokens` are the token ids behind `keys`, as u32 little endian. `found`: the last one that
        was found for the same keys and tokens, now or earlier; what of them is still there isn't
        compared again.
        """
        nodes = self._match(keys, tokens, limit, found)
        blocks = [node.copies[0] for node in nodes]
        idle = len(self.pool.share(blocks))  # a tail: whoever uses a node uses all before it
        self._idle.reuse(nodes[len(nodes) - idle :])
        self.open_leases += 1
        return Lease(self, nodes, blocks)

    def allocate(self, count: int) -> list[int]:
        """Private blocks, evicting as needed. Raises InvariantError beyond `available`."""
        while self.pool.count(BlockState.FREE) < count and self._idle:
            self._evict(self._idle.pop())
        return self.pool.take(count)

    def used(self, nodes: Sequence[Node], tenant: str, again: bool = False) -> None:
        """A request of `tenant` goes on from these nodes; `again`: not for the first time."""
        self._idle.use(nodes, tenant, again)

    def limit(self, tenant: str, share: float) -> None:
        """The share of the pool that a tenant keeps while others need room, from now on."""
        self._idle.limit(tenant, share)

    def publish(
        self,
        parent: Node | None,
        key: bytes,
        tokens: bytes,
        block: int,
        tenant: str,
        adapter: str = "",
    ) -> Node | None:
        """A private block of `tenant`, fully computed and committed, becomes visible behind
        `parent`. `adapter`: for whoever watches.

        None on a key collision, or where nothing is shared: then the block stays private, and so
        must what follows it.
        """
        if not self.shares:
            return None
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(key, tokens, parent, tenant)
            self._idle.enter(node)
            if parent is not None:
                parent.children += 1
            self.journal.stored(key)
            if self.watcher is not None:
                above = parent.key if parent is not None else None
                self.watcher.stored(key, above, tokens, adapter)
        elif node.parent is not parent or node.tokens != tokens:
            self.collisions += 1
            return None
        else:
            self._join(node, tenant)
        self.pool.publish(block)
        node.copies.append(block)
        self._owners[block] = node
        return node

    def release(self, blocks: Sequence[int]) -> None:
        """Give back the blocks of one table, in table order: they are let go from the tail. Of a
        node that nobody uses any more the only copy stays cached, a surplus one is freed."""
        nodes, published = [], []
        owners = map(self._owners.get, reversed(blocks))
        for block, node in zip(reversed(blocks), owners, strict=True):
            if node is None:
                self.pool.free(block)
            else:
                nodes.append(node)
                published.append(block)
        idle = []
        for place in self.pool.unshare(published):
            node = nodes[place]
            if len(node.copies) == 1:
                idle.append(node)
            else:
                self._forget_copy(node, published[place])
        self._idle.push(idle)

    def frees(self, blocks: Sequence[int]) -> int:
        """How many of the blocks `release` would make available at once."""
        return self.pool.sole(blocks)

    def clear(self) -> int:
        """Drop every cached block that nobody uses; returns how many."""
        dropped = len(self._idle)
        while self._idle:
            self._evict(self._idle.pop())
        if not self._nodes:
            self.journal.cleared()
        return dropped

    def park(self, blocks: int) -> int:
        """Keep `blocks` blocks out of use, or as many of them as nobody uses now; returns how many
        are parked."""
        while len(self.parked) > blocks:
            self.pool.free(self.parked.pop())
        self.parked += self.allocate(min(blocks - len(self.parked), self.available))
        return len(self.parked)

    def nodes(self) -> dict[bytes, Node]:
        """The index, for the invariant check."""
        return self._nodes

    @property
    def idle(self) -> IdleNodes:
        """Nodes that nobody uses; for the invariant check."""
        return self._idle

    def _match(
        self, keys: Sequence[bytes], tokens: bytes, limit: int, found: Node | None
    ) -> list[Node]:
        nodes = _still_there(found, limit)
        first, width = len(nodes), self.block_bytes
        behind = self._chained(nodes[-1] if nodes else None, keys[first:limit])
        wanted = tokens[first * width : (first + len(behind)) * width]
        if b"".join([node.tokens for node in behind]) != wanted:
            behind = _equal(behind, wanted, width)
        return nodes + behind

    def _chained(self, parent: Node | None, keys: Sequence[bytes]) -> list[Node]:
        """The longest path behind `parent` that has these keys."""
        found: list[Node] = []
        for node in map(self._nodes.get, keys):
            if node is None or node.parent is not parent:
                break
            found.append(node)
            parent = node
        return found

    def _join(self, node: Node, tenant: str) -> None:
        """One more request made a block that is there already; an idle copy leaves for it."""
        if not self.pool.refs(node.copies[0]):
            self._idle.reuse((node,))
            self._forget_copy(node, node.copies[0])
        self._idle.use((node,), tenant)

    def _forget_copy(self, node: Node, block: int) -> None:
        node.copies.remove(block)
        del self._owners[block]
        self.pool.free(block)

    def _evict(self, node: Node) -> None:
        if node.children:
            raise InvariantError("a head would be evicted before its tail")
        del self._nodes[node.key]
        if node.parent is not None:
            node.parent.children -= 1
        block = node.copies.pop()
        del self._owners[block]
        self.pool.reclaim(block)
        self.journal.removed(node.key)
        if self.watcher is not None:
            self.watcher.removed(node.key)


def _still_there(last: Node | None, limit: int) -> list[Node]:
    """The path to `last`, at most `limit` blocks of it, without its evicted tail."""
    path: list[Node] = []
    while last is not None:
        path.append(last)
        last = last.parent
    path.reverse()
    del path[limit:]
    while path and not path[-1].copies:
        path.pop()
    return path


def _equal(nodes: list[Node], tokens: bytes, width: int) -> list[Node]:
    """Those before the first one that holds other tokens than these, of `width` bytes each."""
    for place, node in enumerate(nodes):
        if node.tokens != tokens[place * width : (place + 1) * width]:
            return nodes[:place]
    return nodes
