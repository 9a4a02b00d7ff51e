"""The eviction orders node by node: what those of runs have to be equal to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from replica.cache.node import NOBODY, Node


class PlainLru:
    def __init__(self) -> None:
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def push(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._nodes[node] = None

    def remove(self, node: Node) -> None:
        del self._nodes[node]


class PlainSegmented:
    def __init__(self, protected_blocks: int) -> None:
        self._protected_blocks = protected_blocks
        self._probation: OrderedDict[Node, None] = OrderedDict()
        self._protected: OrderedDict[Node, None] = OrderedDict()

    def __iter__(self) -> Iterator[Node]:
        yield from self._probation
        yield from self._protected

    def push(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            (self._protected if node.reused else self._probation)[node] = None
        while len(self._protected) > self._protected_blocks:
            self._probation[self._protected.popitem(last=False)[0]] = None

    def remove(self, node: Node) -> None:
        del (self._probation if node in self._probation else self._protected)[node]


PlainOrder = PlainLru | PlainSegmented


class PlainIdle:
    """All idle nodes, and those of each tenant."""

    def __init__(self, eviction: str, total_blocks: int) -> None:
        self._eviction = eviction
        self._total_blocks = total_blocks
        self._order = self._new()
        self._orders: dict[str, PlainOrder] = {}

    def _new(self) -> PlainOrder:
        return PlainLru() if self._eviction == "lru" else PlainSegmented(self._total_blocks // 2)

    def nodes(self) -> list[Node]:
        return list(self._order)

    def nodes_of(self) -> dict[str, list[Node]]:
        found = {tenant: list(order) for tenant, order in self._orders.items()}
        return {tenant: nodes for tenant, nodes in found.items() if nodes}

    def push(self, nodes: Sequence[Node]) -> None:
        self._order.push(nodes)
        for tenant in dict.fromkeys(node.tenant for node in nodes if node.tenant != NOBODY):
            own = self._orders.setdefault(tenant, self._new())
            own.push([node for node in nodes if node.tenant == tenant])

    def remove(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._order.remove(node)
            if node.tenant != NOBODY:
                self._orders[node.tenant].remove(node)
