"""Cached blocks that nobody uses, and whose turn it is to go: one order over all, one per tenant.

The quota is soft. A tenant may fill a pool that nobody else needs; but while its resident blocks
are more than its share of the pool, its own idle ones go first, whoever needs the room: of several
tenants those of the one that is furthest beyond its share. A node that
a second tenant comes to use (a public prefix) is nobody's from then on, and its ancestors too: so
all children of a tenant's node are that tenant's, and its own order is prefix-closed as well.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from configs.schema import WARM_SHARE, Eviction
from replica.cache.evict import EvictionOrder, eviction_order
from replica.cache.node import NOBODY, Node

MAX_QUOTAS = 4_096
"""Tenants with a share of their own that are remembered; the others have the usual one."""


_tenant = attrgetter("tenant")


class IdleNodes:
    """`resident` counts the blocks of each tenant, idle or in use; nobody's are not counted."""

    def __init__(self, eviction: Eviction, total_blocks: int) -> None:
        self.resident: Counter[str] = Counter()
        self._eviction: Eviction = eviction
        self._total_blocks = total_blocks
        self._quotas: OrderedDict[str, int] = OrderedDict()
        self._order = eviction_order(eviction, total_blocks)
        self._orders: dict[str, EvictionOrder] = {}
        self._over: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, node: Node) -> bool:
        return node in self._order

    def nodes(self) -> list[Node]:
        """Next to be evicted first, quotas apart; for the invariant check."""
        return list(self._order)

    def nodes_of(self) -> dict[str, list[Node]]:
        """Each tenant's own, next to be evicted first; for the invariant check."""
        return {tenant: list(order) for tenant, order in self._orders.items()}

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
        """A request of `tenant` uses `nodes`, which are not idle now; `again`: it did before, so
        that this is no reuse."""
        for node in nodes:
            node.reused = node.reused or not again
            if tenant != node.tenant and node.tenant != NOBODY:
                self._count(node.tenant, -1)
                node.tenant = NOBODY

    def push(self, nodes: Sequence[Node]) -> None:
        """They lost their last user: tails first."""
        for node in nodes:
            if node.reused and node.parent is not None:
                # Who reused it has used its parent, but perhaps as its own, after a preemption.
                node.parent.reused = True
        self._order.push(nodes)
        for tenant, own in groupby(nodes, _tenant):
            if tenant != NOBODY:
                self._order_of(tenant).push(list(own))

    def remove(self, nodes: Sequence[Node]) -> None:
        """They are in use again. Raises KeyError when one was not idle."""
        self._order.remove(nodes)
        for tenant, own in groupby(nodes, _tenant):
            if tenant != NOBODY:
                order = self._orders[tenant]
                order.remove(list(own))
                if not order:
                    del self._orders[tenant]

    def pop(self) -> Node:
        """The one to evict; it is resident no more. Raises StopIteration when there is none."""
        node = self._due().first()
        self.remove((node,))
        self._count(node.tenant, -1)
        return node

    def _due(self) -> EvictionOrder:
        """Whose next is the one to go."""
        over = self._over.keys() & self._orders.keys()
        return self._orders[max(over, key=self._over.__getitem__)] if over else self._order

    def _quota(self, tenant: str) -> int:
        return self._quotas.get(tenant, int(WARM_SHARE * self._total_blocks))

    def _order_of(self, tenant: str) -> EvictionOrder:
        order = self._orders.get(tenant)
        if order is None:
            order = self._orders[tenant] = eviction_order(self._eviction, self._total_blocks)
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
