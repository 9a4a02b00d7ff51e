"""The words and tables of `warmroute kv`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvstore.identity import PUBLIC_SCOPE
from kvstore.kvd.messages import Report
from tools.kv.blocks import BlockView
from tools.show import print_table

_MIB = 1 << 20


def print_report(report: Report) -> None:
    """Memory, users, counts, owners."""
    stats, console = report.stats, Console()
    asked = stats.hits + stats.misses
    share = f" ({stats.hits / asked:.0%})" if asked else ""
    lines = {
        "memory": f"{_mib(stats.used_bytes)} of {_mib(stats.total_bytes)} MiB in {stats.blocks}"
        " blocks",
        "users": f"{stats.sessions} connections; {stats.writing} slots being written,"
        f" {stats.leased} blocks being read, {_mib(stats.quarantined_bytes)} MiB quarantined",
        "reads": f"{stats.hits} hits{share}, {stats.misses} misses",
        "writes": f"{stats.stored} stored, refused: {_counts(stats.refused)}",
        "left": f"{stats.evicted} evicted, {stats.expired} expired, {stats.deleted} deleted",
        "faults": f"{stats.overdue} users late, {stats.reaped} slots taken back,"
        f" {stats.bad_commits} commits refused",
        "up for": f"{report.uptime_s:.0f} s",
    }
    for name, line in lines.items():
        console.print(f"{name:8} {line}", highlight=False, soft_wrap=True)
    if stats.scopes:
        table = Table("owner", "MiB", "of at most", "blocks", box=SIMPLE_HEAD)
        for scope in stats.scopes:
            table.add_row(
                _owner(scope.scope),
                _mib(scope.used_bytes),
                _mib(scope.quota_bytes),
                str(scope.blocks),
            )
        print_table(console, table)


def print_blocks(blocks: Sequence[BlockView]) -> None:
    """One line a block."""
    table = Table("key", "owner", "index", "tokens", "layers", "KiB", "age", box=SIMPLE_HEAD)
    now_ms = time.time() * 1_000
    for block in blocks:
        table.add_row(
            block.key[:16],
            block.owner[:12],
            str(block.index),
            str(block.tokens),
            f"{block.layers} {block.dtype}",
            f"{block.payload_bytes / 1024:.0f}",
            f"{max(0.0, now_ms - block.created_ms) / 1000:.0f} s",
        )
    print_table(Console(), table)


def _owner(scope: str) -> str:
    return "public" if scope == PUBLIC_SCOPE.hex() else scope[:12]


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"
