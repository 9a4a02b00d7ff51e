"""Orders of eviction side by side: how much of a trace's prompts the cache still holds.

Requests one after the other through the real orders, without time. `adaptive` is a prototype that
lives here alone: the segmented order whose protected share follows what was evicted too early, as
ARC does it (Megiddo and Modha 2003). ARC itself may evict what was used again before what was not,
and so a head before its tail; a prefix cache can't.
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvstore.identity import chain
from replica.cache.evict import EvictionOrder, SegmentedQueue, eviction_order
from replica.cache.node import NOBODY, Node
from tools.bench.orders.replay import trace_namespace
from tools.errors import CommandError
from tools.flags import output_file, positive
from tools.sim.call import Trace, TraceError
from tools.sim.prompt import CLUSTER_KEY, TENANT_SALT, prompt_ids
from tools.sim.simulate import load_trace

DEFAULT_TRACE = "agents:rates=2"
SHARES = (0.05, 0.1, 0.2, 0.4)
"""Sizes of the pool, as shares of the trace's different blocks."""


class Adaptive(SegmentedQueue):
    """Remembers as many evicted keys as the pool has blocks, by the segment that they left."""

    def __init__(self, total_blocks: int) -> None:
        super().__init__(total_blocks // 2, "run")
        self._total_blocks = total_blocks
        self._target_blocks = total_blocks / 2
        self._left: dict[bool, OrderedDict[bytes, None]] = {
            False: OrderedDict(),
            True: OrderedDict(),
        }

    def evicted(self, node: Node) -> None:
        """It is gone."""
        left = self._left[node.reused]
        left[node.key] = None
        if len(left) > self._total_blocks:
            left.popitem(last=False)

    def missed(self, key: bytes) -> None:
        """It is asked for: had its segment been larger, it would be here."""
        for reused, step in ((False, -1.0), (True, 1.0)):
            if key in self._left[reused]:
                other = len(self._left[not reused]) / len(self._left[reused])
                target = self._target_blocks + step * max(1.0, other)
                self._target_blocks = min(max(target, 0.0), float(self._total_blocks))
                self.protected_blocks = int(self._target_blocks)
                del self._left[reused][key]


ORDERS: dict[str, Callable[[int], EvictionOrder]] = {
    "lru": lambda blocks: eviction_order("lru", blocks, "run"),
    "segmented": lambda blocks: eviction_order("segmented", blocks, "run"),
    "adaptive": Adaptive,
}


class Cache:
    """What is resident: prefix-closed, and idle between two requests."""

    def __init__(self, order: EvictionOrder, total_blocks: int) -> None:
        self._order = order
        self._total_blocks = total_blocks
        self._nodes: dict[bytes, Node] = {}

    def ask(self, keys: Sequence[bytes]) -> int:
        """One prompt's blocks; returns how many of them were here."""
        path: list[Node] = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            node.reused = True
            path.append(node)
        hits = len(path)
        self._order.reuse(path)
        for key in keys[hits : self._total_blocks]:
            if isinstance(self._order, Adaptive):
                self._order.missed(key)
            while len(self._nodes) >= self._total_blocks:
                self._evict()
            node = Node(key, b"", path[-1] if path else None, NOBODY)
            self._nodes[key] = node
            path.append(node)
        self._order.push(path[::-1])
        return hits

    def _evict(self) -> None:
        node = self._order.first()
        self._order.drop(node)
        del self._nodes[node.key]
        if isinstance(self._order, Adaptive):
            self._order.evicted(node)


def compare(trace: Trace, shares: Sequence[float] = SHARES) -> dict[str, dict[str, float]]:
    """By order, then by the pool's share: cached blocks by all full blocks of the prompts."""
    namespace = trace_namespace(trace)
    prompts = []
    for call in trace.calls:
        ids = prompt_ids(call, trace.block_tokens).tobytes()
        prompts.append(list(chain(CLUSTER_KEY, namespace, TENANT_SALT, ids)))
    different = len({key for prompt in prompts for key in prompt})
    asked = sum(map(len, prompts))
    found: dict[str, dict[str, float]] = {}
    for name, make in ORDERS.items():
        found[name] = {}
        for share in shares:
            blocks = max(1, int(share * different))
            cache = Cache(make(blocks), blocks)
            found[name][f"{share:g}"] = sum(map(cache.ask, prompts)) / max(1, asked)
    return found


def main(argv: Sequence[str]) -> int:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(prog="warmroute bench evict", description=__doc__)
    add = parser.add_argument
    add("trace", nargs="?", default=DEFAULT_TRACE, help="as of `warmroute sim` (%(default)s)")
    add("--requests", type=positive, metavar="N", help="only the first ones of the trace")
    add("--json", type=output_file, metavar="FILE", help="write the figures here")
    flags = parser.parse_args(argv)
    try:
        trace = load_trace(flags.trace)
    except TraceError as error:
        raise CommandError(str(error)) from error
    if flags.requests:
        trace = replace(trace, calls=trace.calls[: flags.requests])
    found = compare(trace)
    print(f"{trace.name}: {len(trace.calls)} requests; cached share of the prompts' blocks")
    print("pool, of all blocks  " + "  ".join(f"{share:>6g}" for share in SHARES))
    for name, ratios in found.items():
        print(f"{name:>19}  " + "  ".join(f"{ratio:6.3f}" for ratio in ratios.values()))
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0
