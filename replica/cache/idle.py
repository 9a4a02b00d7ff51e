"""Cached blocks that nobody uses, and whose turn it is to go: one order over all, one per tenant.

The quota is soft. A tenant may fill a pool that nobody else needs; but while its resident blocks
are more than its share of the pool, its own idle ones go first, whoever needs the room: of several
tenants those of the one that is furthest beyond its share. A node that
a second tenant comes to use (a public prefix) is nobody's from then on, and its ancestors too: so
all children of a tenant's node are that tenant's, and its own order is prefix-closed as well.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence

from configs.schema import WARM_SHARE, Eviction
from replica.cache.evict import EvictionOrder, eviction_order
from replica.cache.node import NOBODY, Node

MAX_QUOTAS = 4_096
"""Tenants with a share of their own that are remembered; the others have the usual one."""


MAX_SHOWN = 16
"""Tenants whose share is told."""


def _is_nobodys(node: Node) -> bool:
    return node.tenant == NOBODY


def _is_owned(node: Node) -> bool:
    return node.tenant != NOBODY


class IdleNodes:
    """`resident` counts the blocks of each tenant, idle or in use; nobody's are not counted."""

    def __init__(self, eviction: Eviction, total_blocks: int) -> None:
        self.resident: Counter[str] = Counter()
        self._eviction: Eviction = eviction
        self._total_blocks = total_blocks
        self._quotas: OrderedDict[str, int] = OrderedDict()
        self._order = eviction_order(eviction, total_blocks, "run")
        self._orders: dict[str, EvictionOrder] = {}
        self._over: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._order)

    def nodes(self) -> list[Node]:
        """Next to be evicted first, quotas apart; for the invariant check."""
        return list(self._order)

    def nodes_of(self) -> dict[str, list[Node]]:
        """Each tenant's own, next to be evicted first; for the invariant check."""
        return {tenant: list(order) for tenant, order in self._orders.items()}

    def most_resident(self) -> dict[str, int]:
        """Blocks by tenant, of the MAX_SHOWN that hold most, the most first."""
        return dict(self.resident.most_common(MAX_SHOWN))

    def limit(self, tenant: str, share: float) -> None:
        """What its quota is from now on."""
        blocks = int(share * self._total_blocks)
        if blocks == self._quota(tenant):
            return
        self._quotas[tenant] = blocks
        self._quotas.move_to_end(tenant)
        if len(self._quotas) > MAX_QUOTAS:
            self._quotas.popitem(last=False)
        self._count(tenant, 0)

    def enter(self, node: Node) -> None:
        """A new node, in use."""
        self._count(node.tenant, 1)

    def use(self, nodes: Sequence[Node], tenant: str, again: bool = False) -> None:
        """A request of `tenant` uses `nodes`, which are not idle now, heads of a path first;
        `again`: it did before, so that this is no reuse."""
        for node in reversed(nodes):
            if (node.reused or again) and node.tenant in (tenant, NOBODY):
                return  # so it is with all before it
            node.reused = node.reused or not again
            if node.tenant not in (tenant, NOBODY):
                self._count(node.tenant, -1)
                node.tenant = NOBODY

    def push(self, nodes: Sequence[Node]) -> None:
        """They lost their last user: a part of one path, tails first."""
        for node in nodes:
            if node.reused and node.parent is not None:
                # Who reused it has used its parent, but perhaps as its own, after a preemption.
                node.parent.reused = True
        self._order.push(nodes)
        own = bisect_left(nodes, True, key=_is_nobodys)
        if own:
            self._order_of(nodes[0].tenant).push(nodes[:own])

    def reuse(self, nodes: Sequence[Node]) -> None:
        """They are in use again: a part of one path, heads first, and no ancestor of theirs is
        idle. Raises InvariantError when one was not idle."""
        self._order.reuse(nodes)
        first = bisect_left(nodes, True, key=_is_owned)
        if first < len(nodes):
            tenant = nodes[first].tenant
            self._orders[tenant].reuse(nodes[first:])
            self._forget_empty(tenant)

    def pop(self) -> Node:
        """The one to evict; it is resident no more. Raises StopIteration when there is none."""
        node = self._due().first()
        self._order.drop(node)
        if node.tenant != NOBODY:
            self._orders[node.tenant].drop(node)
            self._forget_empty(node.tenant)
        self._count(node.tenant, -1)
        return node

    def _forget_empty(self, tenant: str) -> None:
        if not self._orders[tenant]:
            del self._orders[tenant]

    def _due(self) -> EvictionOrder:
        """Whose next is the one to go."""
        over = self._over.keys() & self._orders.keys()
        return self._orders[max(over, key=self._over.__getitem__)] if over else self._order

    def _quota(self, tenant: str) -> int:
        return self._quotas.get(tenant, int(WARM_SHARE * self._total_blocks))

    def _order_of(self, tenant: str) -> EvictionOrder:
        order = self._orders.get(tenant)
        if order is None:
            order = eviction_order(self._eviction, self._total_blocks, "own_run")
            self._orders[tenant] = order
        return order

    def _count(self, tenant: str, change: int) -> None:
        if tenant == NOBODY:
            return
        self.resident[tenant] += change
        left = self.resident[tenant]
        if not left:
            del self.resident[tenant]
        excess = left - self._quota(tenant)
        if excess > 0:
            self._over[tenant] = excess
        else:
            self._over.pop(tenant, None)
