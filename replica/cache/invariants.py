"""What must hold between pool, index and eviction queue; O(blocks), for tests and for idle time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from events.errors import InvariantError
from replica.cache.node import NOBODY, Node
from replica.cache.pool import BlockPool, BlockState
from replica.cache.prefix import PrefixCache


def require(holds: bool, promise: str) -> None:
    """Raises InvariantError with the promise that was broken."""
    if not holds:
        raise InvariantError(promise)


def check_cache(cache: PrefixCache, tables: Iterable[Sequence[int]]) -> None:
    """`tables`: the block tables of all requests. Raises InvariantError."""
    users = Counter(block for table in (*tables, cache.parked) for block in table)
    require(cache.open_leases == 0, "no lease outlives the planning of its request")
    _check_pool(cache.pool, users)
    for node in cache.nodes().values():
        _check_node(cache, node)
    _check_owners(cache)
    _check_idle(cache)


def _check_pool(pool: BlockPool, users: Counter[int]) -> None:
    states = Counter(pool.state(block) for block in range(pool.total_blocks))
    for state in BlockState:
        require(states[state] == pool.count(state), f"the count of {state.name} blocks is right")
    require(sum(states.values()) == pool.total_blocks, "the states add up to all blocks")
    free = pool.free_ids()
    require(len(free) == len(set(free)), "no block is twice in the free list")
    require(len(free) == states[BlockState.FREE], "the free list holds exactly the free blocks")
    for block in range(pool.total_blocks):
        require(pool.refs(block) == users[block], f"references equal users (block {block})")
        if pool.state(block) is BlockState.PRIVATE:
            require(users[block] == 1, f"one writer per block (block {block})")
        if pool.state(block) in (BlockState.FREE, BlockState.CACHED, BlockState.FENCED):
            require(users[block] == 0, f"a block in use is not free (block {block})")


def _check_node(cache: PrefixCache, node: Node) -> None:
    nodes = cache.nodes()
    require(nodes.get(node.key) is node, "a node is found under its own key")
    require(len(node.tokens) == cache.block_bytes, "only full blocks are published")
    require(len(node.copies) >= 1, "a resident node has a copy")
    if node.parent is not None:
        require(nodes.get(node.parent.key) is node.parent, "the cache is prefix-closed")
    for block in node.copies:
        state = cache.pool.state(block)
        require(state in (BlockState.LEASED, BlockState.CACHED), "published blocks are not free")
        require(state is BlockState.LEASED or len(node.copies) == 1, "idle nodes have one copy")


def _check_owners(cache: PrefixCache) -> None:
    pool = cache.pool
    copies = [block for node in cache.nodes().values() for block in node.copies]
    require(len(copies) == len(set(copies)), "a block holds one node")
    published = pool.count(BlockState.LEASED) + pool.count(BlockState.CACHED)
    require(len(copies) == published, "every published block belongs to a node")
    children = Counter(id(node.parent) for node in cache.nodes().values() if node.parent)
    for node in cache.nodes().values():
        require(node.children == children[id(node)], "children are counted right")


def _check_idle(cache: PrefixCache) -> None:
    idle = cache.idle.nodes()
    require(len(idle) == cache.pool.count(BlockState.CACHED), "idle nodes are the cached blocks")
    _check_order(idle)
    places = {id(node) for node in idle}
    for node in idle:
        require(cache.pool.refs(node.copies[0]) == 0, "nobody uses an idle node")
    for node in cache.nodes().values():
        if id(node) not in places and node.parent is not None:
            require(id(node.parent) not in places, "a node in use keeps its parent in use")
    _check_tenants(cache, idle)


def _check_order(idle: Sequence[Node]) -> None:
    place = {id(node): index for index, node in enumerate(idle)}
    for node in idle:
        if node.parent is not None and id(node.parent) in place:
            require(place[id(node)] < place[id(node.parent)], "tails are evicted before heads")


def _check_tenants(cache: PrefixCache, idle: Sequence[Node]) -> None:
    nodes = cache.nodes().values()
    resident = Counter(node.tenant for node in nodes if node.tenant != NOBODY)
    require(resident == cache.idle.resident, "each tenant's blocks are counted right")
    for node in nodes:
        parent = node.parent
        if parent is not None and parent.tenant != NOBODY:
            require(node.tenant == parent.tenant, "what is behind a tenant's node is its own")
    own = cache.idle.nodes_of()
    require(
        sum(map(len, own.values())) == sum(node.tenant != NOBODY for node in idle),
        "own ones are all listed",
    )
    for tenant, order in own.items():
        require(all(node.tenant == tenant for node in order), "a tenant's order holds its own")
        _check_order(order)
