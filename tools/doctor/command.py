"""`warmroute doctor`: what a set-up lacks, in plain words; with --capacity, what a replica holds.

Without flags: this machine, and the cluster that `warmroute up` runs, if it does (its alarms, and
whether a prompt that was made warm is found again). Exit status 1 when something won't work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from rich.console import Console

from configs.load import ConfigError, load_cluster
from tools.doctor.cluster import cluster_findings
from tools.doctor.finding import Finding, Verdict
from tools.doctor.machine import machine_findings, port_finding
from tools.doctor.plan import add_flags, plan
from tools.errors import CommandError
from tools.flags import output_file
from tools.local import admin_of
from tools.up.state import default_folder, held

STYLES = {Verdict.GOOD: "green", Verdict.SLOW: "yellow", Verdict.BROKEN: "red"}
WITH_CAPACITY = "with --capacity"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warmroute doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--state", type=Path, help="state folder of the cluster")
    parser.add_argument("--url", help="the gateway (default: the one that `warmroute up` started)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write what was found")
    parser.add_argument("--capacity", action="store_true", help="what a replica's memory holds")
    add_flags(parser.add_argument_group(WITH_CAPACITY))
    return parser


def _idle_flags(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> list[str]:
    """What was asked of --capacity and would be ignored without it."""
    return [
        action.option_strings[0]
        for group in parser._action_groups
        if group.title == WITH_CAPACITY
        for action in group._group_actions
        if getattr(flags, action.dest) != action.default
    ]


async def _cluster(state: Path | None, url: str | None) -> list[Finding] | None:
    """Of the cluster that runs; None when none does."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30.0)) as session:
        try:
            admin = admin_of(session, state, url)
            await admin.policy()
        except (CommandError, ConfigError):
            if url:
                raise
            return None
        # Of a gateway elsewhere this machine's cluster file says nothing.
        configured = () if url else _configured(state)
        return [finding async for finding in cluster_findings(admin, configured)]


def _configured(state: Path | None) -> tuple[str, ...]:
    """Ids of all that the cluster file names to answer. Raises ConfigError."""
    cluster = load_cluster((state or default_folder("local")) / "cluster.toml")
    return tuple(of.id for of in (*cluster.replicas, *cluster.backends))


def examine(state: Path | None, url: str | None) -> list[Finding]:
    """Machine first, then the cluster, or the port that one would take."""
    found = list(machine_findings())
    running = asyncio.run(_cluster(state, url))
    if running is not None:
        return [*found, *running]
    if not url and held(state or default_folder("local")):
        text = "`warmroute up` has begun one here that does not answer yet"
        return [*found, Finding(Verdict.SLOW, "cluster", text, "ask again when it says ready")]
    host, port = DEFAULT_HOST, DEFAULT_PORT
    try:
        router = load_cluster((state or default_folder("local")) / "cluster.toml").router
        host, port = router.host, router.port
    except ConfigError:
        pass
    return [*found, port_finding(host, port), Finding(Verdict.GOOD, "cluster", "none runs here")]


def main(argv: Sequence[str]) -> int:
    """Examine or plan, print, write."""
    parser = _parser()
    flags = parser.parse_args(argv)
    if not flags.capacity and (idle := _idle_flags(parser, flags)):
        parser.error(f"{', '.join(idle)} says something of --capacity, which is missing")
    console = Console()
    if flags.capacity:
        figures = plan(flags, console)
        if flags.json:
            flags.json.write_text(json.dumps(figures, indent=2) + "\n")
        return int(not figures["fits"])
    found = examine(flags.state, flags.url)
    for finding in found:
        colour = STYLES[finding.verdict]
        console.print(
            f"[{colour}]{finding.verdict.value:>5}[/]  {finding.about:<14} ",
            end="",
            highlight=False,
        )
        remedy = f" -> {finding.remedy}" if finding.remedy else ""
        console.print(finding.text + remedy, markup=False, highlight=False, soft_wrap=True)
    if flags.json:
        rows = [
            {"verdict": of.verdict.value, "about": of.about, "text": of.text, "remedy": of.remedy}
            for of in found
        ]
        flags.json.write_text(json.dumps({"findings": rows}, indent=2) + "\n")
    return int(any(finding.verdict is Verdict.BROKEN for finding in found))
