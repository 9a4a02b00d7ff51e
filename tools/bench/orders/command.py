"""Orders of service side by side: goodput, waits and CPU, on a trace through the real scheduler."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from replica.sched.policies import POLICIES
from tools.bench.orders.backlog import backlog
from tools.bench.orders.replay import replay
from tools.errors import CommandError
from tools.flags import factor, natural, output_file, positive
from tools.sim.call import TraceError
from tools.sim.profiles import DEVICES
from tools.sim.simulate import load_trace

DEFAULT_TRACE = "agents:rates=2"

COLUMNS = {
    "slo_share": ("in time", ".3f"),
    "goodput_per_s": ("per s", ".2f"),
    "refused": ("refused", "d"),
    "ttft_mean_s": ("TTFT", ".2f"),
    "ttft_p99_s": ("p99", ".1f"),
    "longest_wait_s": ("longest", ".1f"),
    "preemptions": ("preempted", "d"),
    "plan_p99_us": ("plan p99", ".0f"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="warmroute bench orders", description=__doc__)
    add = parser.add_argument
    add("trace", nargs="?", default=DEFAULT_TRACE, help="as of `warmroute sim` (%(default)s)")
    add("--order", choices=[*POLICIES, "all"], default="all")
    add(
        "--load",
        type=factor,
        default=1.2,
        metavar="U",
        help="as a multiple of what one replica could serve without any cache (%(default)s)",
    )
    add("--requests", type=positive, metavar="N", help="only the first ones of the trace")
    add("--device", choices=sorted(DEVICES), default="h100-8b")
    add("--kv-tokens", type=positive, default=1_048_576, help="of the replica's pool")
    add("--waiting", type=natural, default=10_000, help="in the queue whose planning is timed")
    add("--steps", type=positive, default=300, help="whose planning is timed (%(default)s)")
    add("--rounds", type=positive, default=3, help="of these very steps (%(default)s)")
    add("--seed", type=int, default=1)
    add("--json", type=output_file, metavar="FILE", help="write the figures here")
    return parser


def main(argv: Sequence[str]) -> int:
    """Replay under each order, print, write."""
    flags = _parser().parse_args(argv)
    try:
        trace = load_trace(flags.trace)
    except TraceError as error:
        raise CommandError(str(error)) from error
    if flags.requests:
        trace = replace(trace, calls=trace.calls[: flags.requests])
    device = DEVICES[flags.device]
    if flags.kv_tokens // trace.block_tokens < 2:
        raise CommandError(f"--kv-tokens {flags.kv_tokens}: less than two blocks of this trace")
    orders = tuple(POLICIES) if flags.order == "all" else (flags.order,)
    found: dict[str, dict[str, Any]] = {}
    for order in track(orders, description="orders", transient=True):
        found[order] = replay(trace, device, order, flags.load, flags.kv_tokens, flags.seed)
        found[order]["backlog"] = backlog(order, flags.waiting, flags.steps, flags.rounds)
    settings = {
        "trace": trace.name,
        "requests": len(trace.calls),
        "device": device.name,
        "load": flags.load,
        "kv_tokens": flags.kv_tokens,
        "seed": flags.seed,
        "waiting": flags.waiting,
    }
    _print(settings, found)
    if flags.json:
        flags.json.write_text(json.dumps({"settings": settings, "orders": found}, indent=2) + "\n")
    return 0


def _print(settings: dict[str, Any], found: dict[str, dict[str, Any]]) -> None:
    console = Console()
    console.print(
        "{trace}: {requests} requests, one {device}, load {load:g}; times in s, CPU in us; "
        "in time: first token by its due time (tools/bench/orders/traffic.py)".format(**settings),
        highlight=False,
    )
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("order", no_wrap=True)
    for heading, _ in COLUMNS.values():
        table.add_column(heading, justify="right", min_width=len(max(heading.split(), key=len)))
    for order, figures in found.items():
        table.add_row(order, *(format(figures[key], form) for key, (_, form) in COLUMNS.items()))
    console.print(table)
    for order, figures in found.items():
        shares = figures["slo_share_by_kind"] | figures["slo_share_by_tenant"]
        text = ", ".join(f"{name} {share:.3f}" for name, share in shares.items())
        console.print(f"{order}: in time {text}", highlight=False)
    queues = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    queues.title = f"CPU of a plan with {settings['waiting']} waiting, in us"
    for heading in ("queue", "order", "p50", "p99", "most"):
        queues.add_column(heading, justify="left" if heading == "queue" else "right")
    for order, figures in found.items():
        for name, costs in figures["backlog"].items():
            queues.add_row(name, order, *(format(cost, ".0f") for cost in costs.values()))
    console.print(queues)
