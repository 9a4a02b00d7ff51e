"""`warmroute sim`: a trace replayed over simulated replicas, by the router's own code."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from router.policies import POLICIES
from tools.errors import CommandError
from tools.flags import factor, output_file, positive
from tools.sim.call import Trace, TraceError
from tools.sim.profiles import DEVICES
from tools.sim.settings import CLAIRVOYANT, Settings
from tools.sim.summary import SLO_TTFT_S, summary
from tools.sim.traces import read_trace
from tools.sim.wire import BusFaults
from tools.sim.world import World

EVERY = "all"
COLUMNS = {
    "cached_token_ratio": ("cached", ".3f"),
    "ttft_mean_s": ("TTFT", ".2f"),
    "ttft_p50_s": ("p50", ".2f"),
    "ttft_p90_s": ("p90", ".2f"),
    "ttft_p99_s": ("p99", ".2f"),
    "e2e_mean_s": ("E2E", ".2f"),
    "itl_p99_ms": ("ITL p99", ".0f"),
    "slo_share": ("in SLO", ".3f"),
    "max_over_mean_load": ("load", ".2f"),
}
"""Figure to heading and form: means in s, gaps in ms, load as the largest over the mean."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warmroute sim", description=__doc__.split(": ", 1)[1].capitalize()
    )
    parser.add_argument("trace", type=Path, help="JSON lines with hash_ids or hash_runs, or a CSV")
    parser.add_argument("--replicas", type=positive, default=8, metavar="N")
    parser.add_argument(
        "--load",
        type=factor,
        default=0.75,
        metavar="U",
        help="as a multiple of what the replicas could serve without any cache (%(default)s)",
    )
    parser.add_argument(
        "--policy",
        choices=[*sorted(POLICIES), CLAIRVOYANT, EVERY],
        default="warmroute",
        help="clairvoyant knows true caches and queues: a bound, no competitor",
    )
    parser.add_argument("--device", choices=sorted(DEVICES), default="h100-8b")
    parser.add_argument(
        "--kv-tokens", type=positive, default=1_048_576, help="of each replica's pool"
    )
    parser.add_argument("--slo-ttft-s", type=factor, default=SLO_TTFT_S, metavar="S")
    parser.add_argument("--lag-ms", type=float, default=1.0, help="from replica to router")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="messages overtake each other")
    parser.add_argument("--loss", type=float, default=0.0, help="share of messages that get lost")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures here")
    return parser


def _policies(chosen: str) -> list[str]:
    """Ours first, the bound last."""
    if chosen != EVERY:
        return [chosen]
    return ["warmroute", *sorted(POLICIES.keys() - {"warmroute"}), CLAIRVOYANT]


def simulate(trace: Trace, flags: argparse.Namespace) -> dict[str, Any]:
    """All policies on one trace."""
    bus = BusFaults(flags.lag_ms / 1e3, flags.jitter_ms / 1e3, flags.loss)
    device = DEVICES[flags.device]
    policies = {}
    for name in track(_policies(flags.policy), description="policies", transient=True):
        settings = Settings(
            policy=name,
            replicas=flags.replicas,
            load=flags.load,
            device=device,
            kv_tokens=flags.kv_tokens,
            seed=flags.seed,
            bus=bus,
        )
        policies[name] = summary(World(trace, settings).run(), flags.slo_ttft_s)
    return {
        "settings": {
            "trace": trace.name,
            "requests": len(trace.calls),
            "block_tokens": trace.block_tokens,
            "replicas": flags.replicas,
            "load": flags.load,
            "device": device.name,
            "device_source": device.source,
            "kv_tokens": flags.kv_tokens,
            "slo_ttft_s": flags.slo_ttft_s,
            "lag_ms": flags.lag_ms,
            "jitter_ms": flags.jitter_ms,
            "loss": flags.loss,
            "seed": flags.seed,
        },
        "policies": policies,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """One row a policy."""
    of = result["settings"]
    title = (
        f"{of['trace']}: {of['requests']} requests, {of['replicas']} x {of['device']}, "
        f"load {of['load']:g}, SLO: TTFT within {of['slo_ttft_s']:g} s"
    )
    table = Table(title=title)
    table.add_column("policy")
    for heading, _ in COLUMNS.values():
        table.add_column(heading, justify="right")
    for name, figures in result["policies"].items():
        label = f"({name})" if name == CLAIRVOYANT else name
        table.add_row(label, *(format(figures[key], form) for key, (_, form) in COLUMNS.items()))
    console.print(table)


def main(argv: Sequence[str]) -> int:
    """Simulate, print, write."""
    flags = _parser().parse_args(argv)
    try:
        trace = read_trace(flags.trace)
    except TraceError as error:
        raise CommandError(str(error)) from error
    result = simulate(trace, flags)
    show(result, Console())
    if flags.json:
        flags.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0
