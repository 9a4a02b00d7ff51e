"""`warmroute bench NAME`: which benchmark to run."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

BENCHES = {
    "book": ("tools.bench.book.command", "all policies on the standard simulations, as a book"),
    "bus": ("tools.bench.bus", "what ticks, deltas and snapshots of the bus cost"),
    "calls": ("tools.bench.gateway.calls", "calls in the gateway for a request and for a delta"),
    "chunks": ("tools.bench.chunks.command", "what the gateway's CPU does for one delta, and lag"),
    "demo": ("tools.bench.demo.command", "routing policies side by side on the running cluster"),
    "engine": ("tools.bench.engine.command", "the engine beside others: prefill, decode, overhead"),
    "evict": ("tools.bench.evict", "what the cache still holds under each order of eviction"),
    "front": ("tools.bench.front.command", "the front in the engine's process or beside it"),
    "gateway": (
        "tools.bench.gateway.command",
        "requests and chunks a second on one core",
    ),
    "kv": ("tools.bench.kv.command", "tiers of the KV store beside plain copies of the bytes"),
    "live": ("tools.bench.live.command", "live servers in turn: ours, peers, any OpenAI URL"),
    "lora": ("tools.bench.lora", "what adapters cost a decode step"),
    "sched": ("tools.bench.sched", "what plan and commit cost, and long prompts those who decode"),
    "orders": ("tools.bench.orders.command", "orders of service side by side on one replica"),
    "router": ("tools.bench.router", "the router's choice: time, memory, errors"),
}


def main(argv: Sequence[str]) -> int:
    """Run one benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="warmroute bench", description="Measure on this machine.")
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, (_, text) in BENCHES.items():
        names.add_parser(name, help=text, add_help=False)
    if not argv:
        parser.error(f"which one? {', '.join(sorted(BENCHES))} (--help says what each is for)")
    chosen = parser.parse_args(list(argv)[:1])
    return int(importlib.import_module(BENCHES[chosen.name][0]).main(list(argv)[1:]) or 0)
