"""`warmroute sim`: a trace replayed over simulated replicas, by the router's own code."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import get_args

from rich.console import Console
from rich.progress import track

from configs.schema import Eviction
from tools.errors import CommandError
from tools.flags import (
    OWN_TIMES,
    add_keep_bins,
    amount,
    factor,
    natural,
    output_file,
    pace,
    picture_file,
    positive,
    share,
)
from tools.show import print_table
from tools.sim.call import Trace, TraceError
from tools.sim.faults import fault, speed
from tools.sim.plot import draw, require_matplotlib
from tools.sim.profiles import DEVICES
from tools.sim.roles import print_roles, roles_report
from tools.sim.settings import ITL_TARGET_MS, Settings
from tools.sim.simulate import EVERY, OURS, load_trace, simulate
from tools.sim.summary import SLO_TTFT_S
from tools.sim.table import table, title
from tools.sim.tiers import TierSpec
from tools.sim.wire import BusFaults

ALL = "all"
HOST_LATENCY_MS = 0.2
SHARED_LATENCY_MS = 2.0
REPLICAS = 8
LEAST_SPLIT = 2
SLO_TPOT_MS = 50.0
HANDED_OFF_TOKENS = 4_194_304
"""Room of the store between those that compute and those that answer, where none is given."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warmroute sim", description=__doc__.split(": ", 1)[1].capitalize()
    )
    parser.add_argument(
        "trace",
        help="a file (JSON lines with hash_ids or hash_runs, or a CSV), or one made up: "
        "groups:, agents:, siblings: or mixed:, with settings behind it: groups:prompts=5,zipf=1",
    )
    add_keep_bins(parser)
    parser.add_argument(
        "--replicas", type=natural, metavar="N", help="default: 8, none where others have roles"
    )
    parser.add_argument(
        "--load",
        type=pace,
        default=0.75,
        metavar="U",
        help="as a multiple of what the replicas could serve without any cache (%(default)s); "
        f"'{OWN_TIMES}' plays the trace as it is",
    )
    parser.add_argument(
        "--policy",
        choices=[*EVERY, ALL],
        default=OURS,
        help="clairvoyant knows true caches and queues: a bound, no competitor",
    )
    parser.add_argument("--device", choices=sorted(DEVICES), default="h100-8b")
    parser.add_argument(
        "--kv-tokens", type=positive, default=1_048_576, help="of each replica's pool"
    )
    parser.add_argument(
        "--itl-target-ms",
        type=amount,
        default=ITL_TARGET_MS,
        help="longest step while others decode (%(default)g); 0 for none",
    )
    parser.add_argument(
        "--eviction", choices=get_args(Eviction), default="segmented", help="of cached blocks"
    )
    parser.add_argument("--slo-ttft-s", type=factor, default=SLO_TTFT_S, metavar="S")
    parser.add_argument(
        "--capacity-slo-s",
        type=factor,
        metavar="S",
        help="also find the highest load at which p90 TTFT stays within this, by bisection",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures here")
    parser.add_argument("--plot", type=picture_file, metavar="FILE", help="draw them")
    _add_roles(parser.add_argument_group("those that compute prompts, and those that answer"))
    _add_tiers(parser.add_argument_group("tiers below the devices"))
    _add_faults(parser.add_argument_group("what goes wrong"))
    return parser


def _add_roles(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--prefill", type=natural, default=0, metavar="P", help="replicas that compute prompts")
    add("--decode", type=natural, default=0, metavar="D", help="replicas that answer")
    add(
        "--pd",
        action="store_true",
        help="which ratio of both the trace asks for, of --replicas in all, and what it brings",
    )
    add("--slo-tpot-ms", type=factor, default=SLO_TPOT_MS, metavar="MS", help="of --pd")
    add("--away", type=natural, default=1, metavar="N", help="of a part that may fail (--pd)")


def _add_tiers(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host-tokens", type=positive, metavar="N", help="of KV in each replica's host memory")
    add("--host-gbytes-per-s", type=factor, default=25.0, metavar="G", help="default: %(default)g")
    add("--shared-tokens", type=positive, metavar="N", help="of KV in a store of all replicas")
    add("--shared-gbytes-per-s", type=factor, default=3.0, metavar="G", help="default: %(default)g")


def _tiers(flags: argparse.Namespace) -> tuple[TierSpec, ...]:
    tiers = []
    if flags.host_tokens:
        tiers.append(TierSpec(flags.host_tokens, flags.host_gbytes_per_s, HOST_LATENCY_MS, False))
    if not flags.shared_tokens and (flags.prefill or flags.pd):
        flags.shared_tokens = HANDED_OFF_TOKENS
    if flags.shared_tokens:
        speed = flags.shared_gbytes_per_s
        tiers.append(TierSpec(flags.shared_tokens, speed, SHARED_LATENCY_MS, True))
    return tuple(tiers)


def _add_faults(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--lag-ms", type=amount, default=1.0, help="from replica to router")
    group.add_argument("--jitter-ms", type=amount, default=0.0, help="messages overtake each other")
    group.add_argument("--loss", type=share, default=0.0, help="share of messages that get lost")
    many = {"action": "append", "default": []}
    group.add_argument("--slow", type=speed, metavar="r0=0.5", help="at that speed", **many)
    group.add_argument("--muted", metavar="r1", help="it publishes no digests", **many)
    group.add_argument(
        "--fault",
        type=fault,
        metavar="30:restart:r0",
        help="after so many seconds: die or restart a replica, let another join, or 30:router",
        **many,
    )


def _settings(flags: argparse.Namespace) -> Settings:
    """All but the policy. Raises CommandError where the flags contradict each other."""
    try:
        roles = flags.prefill + flags.decode
        return Settings(
            policy=OURS,
            replicas=(0 if roles else REPLICAS) if flags.replicas is None else flags.replicas,
            prefill=flags.prefill,
            decode=flags.decode,
            load=flags.load,
            device=DEVICES[flags.device],
            kv_tokens=flags.kv_tokens,
            eviction=flags.eviction,
            tiers=_tiers(flags),
            itl_target_ms=flags.itl_target_ms,
            seed=flags.seed,
            bus=BusFaults(flags.lag_ms / 1e3, flags.jitter_ms / 1e3, flags.loss),
            speeds=tuple(flags.slow),
            muted=tuple(flags.muted),
            faults=tuple(flags.fault),
        )
    except ValueError as error:
        raise CommandError(str(error)) from error


def main(argv: Sequence[str]) -> int:
    """Simulate, print, write."""
    flags = _parser().parse_args(argv)
    settings = _settings(flags)
    if flags.plot:
        require_matplotlib()
    try:
        trace = load_trace(flags.trace, flags.keep_bins)
    except TraceError as error:
        raise CommandError(str(error)) from error
    if settings.load is not None and not trace.span_s:
        said = f"all of the trace comes at one moment: '--load {OWN_TIMES}' plays it as it is"
        raise CommandError(said)
    if flags.pd:
        return _roles(flags, trace, settings)
    chosen = EVERY if flags.policy == ALL else (flags.policy,)
    result = simulate(trace, settings, _shown(chosen), flags.slo_ttft_s, flags.capacity_slo_s)
    console = Console()
    console.print(title(result["settings"]), highlight=False)
    print_table(console, table(result))
    for name, figures in result["policies"].items():
        if figures["failed"]:
            lost = f"{figures['failed']} of {figures['requests']} requests got no answer"
            console.print(f"{name}: {lost}; times are of the others", highlight=False)
    if flags.json:
        flags.json.write_text(json.dumps(result, indent=2) + "\n")
    if flags.plot:
        draw(result, flags.plot)
    return 0


def _shown(policies: Sequence[str]) -> Iterator[str]:
    """Each as its turn comes: a bar on a terminal, else a line each on standard error."""
    if sys.stdout.isatty():
        yield from track(policies, description="policies", transient=True)
        return
    for number, policy in enumerate(policies, 1):
        _say(f"{policy}: policy {number} of {len(policies)}")
        yield policy


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _roles(flags: argparse.Namespace, trace: Trace, settings: Settings) -> int:
    """The worksheet and its simulations. Raises CommandError."""
    if settings.prefill or settings.decode or settings.replicas < LEAST_SPLIT:
        raise CommandError("--pd finds the roles of --replicas (2 or more) by itself")
    report = roles_report(trace, settings, flags.slo_ttft_s, flags.slo_tpot_ms, flags.away, _say)
    print_roles(Console(), report)
    if flags.json:
        flags.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0
