"""`warmroute bench demo`: what cache-aware routing gains here, shown on real requests."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from configs.model.card import ModelCard, load_card
from tools.admin import AdminClient
from tools.bench.client import ChatClient
from tools.bench.demo.ceiling import CeilingCache
from tools.bench.demo.lines import Lines
from tools.bench.demo.load import Load, arrivals, conversations
from tools.bench.demo.report import plot, print_table, summary
from tools.bench.demo.run import DemoRunner, PolicyRun
from tools.errors import CommandError
from tools.flags import factor, output_file, picture_file, policy_names
from tools.up.state import cluster_of, default_folder, read_keys

TENANTS = 8
SYSTEM_TOKENS = 1_000
CACHE_SHARE = 0.6
"""Share of the load's blocks that each replica may hold."""

COLD_TRIES = 2
"""The first request after a start is slower than what follows."""

DEFAULT_LOAD = 1.8
"""Beyond 1 a router that finds nothing warm falls behind: what a miss costs shows as queueing."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warmroute bench demo", description=__doc__.split(": ", 1)[1].capitalize()
    )
    parser.add_argument("--url", help="the gateway (default: the one that `warmroute up` started)")
    parser.add_argument("--state", type=Path, help="state folder of the cluster")
    parser.add_argument("--quick", action="store_true", help="a short load: 24 requests")
    parser.add_argument(
        "--policies",
        type=policy_names,
        default="round_robin,warmroute",
        metavar="A,B",
        help="in this order (default: %(default)s)",
    )
    parser.add_argument(
        "--load",
        type=factor,
        default=DEFAULT_LOAD,
        metavar="U",
        help="requests per second as a multiple of what the replicas could answer without any "
        "cache (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=7, help="of the traffic (default: %(default)s)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--plot",
        type=picture_file,
        default="bench-demo.png",
        metavar="FILE",
        help="draw them here (default: %(default)s)",
    )
    return parser


def cache_limit(ceiling: CeilingCache, load: Load, block_tokens: int) -> int:
    """Blocks that hold CACHE_SHARE of what all conversations come to at their full length.

    The public head is stored once, whoever uses it.
    """
    public = len(ceiling.tokens([{"role": "system", "content": load.public}])) // block_tokens
    blocks = public
    for talk in load.conversations:
        messages = [{"role": "system", "content": talk.system}]
        for question in talk.questions:
            messages.append({"role": "user", "content": question})
        answers = len(talk.questions) * (load.max_tokens + 4)
        blocks += (len(ceiling.tokens(messages)) + answers) // block_tokens + 1 - public
    return int(CACHE_SHARE * blocks)


class Demo:
    """One run of the demo against one gateway."""

    def __init__(self, flags: argparse.Namespace, console: Console) -> None:
        self._flags = flags
        self._console = console
        folder = flags.state or default_folder("local")
        self._keys = read_keys(folder)
        self._config = cluster_of(folder)
        if not self._config.replicas:
            raise CommandError("the demo limits caches: it needs replicas of our own, not backends")
        router = self._config.router
        self._url = flags.url or f"http://{router.host}:{router.port}"
        self._card: ModelCard = load_card(Path(self._config.model.path))
        self._block_tokens = self._config.replicas[0].block_tokens

    def _ceiling(self) -> CeilingCache:
        return CeilingCache(self._card, self._block_tokens)

    def _load(self) -> Load:
        turns = 3 if self._flags.quick else 6
        public, talks = conversations(
            self._card,
            tenants=TENANTS,
            turns=turns,
            system_tokens=SYSTEM_TOKENS,
            seed=self._flags.seed,
        )
        return Load(public, talks, (), max_tokens=16 if self._flags.quick else 32)

    async def run(self) -> dict[str, Any]:
        """All policies in turn; the cluster gets back its policy and its whole cache."""
        load = self._load()
        limit = cache_limit(self._ceiling(), load, self._block_tokens)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            admin = AdminClient(session, self._url, self._keys.admin_key)
            client = ChatClient(session, self._url, self._config.model.name)
            replicas = [of for of in await admin.replicas() if of["state"] == "healthy"]
            before = await admin.policy()
            runner = DemoRunner(admin, client, load, self._ceiling)
            try:
                await runner.prepare()
                load, rate = await self._paced(runner, admin, load, len(replicas))
                runner.use(load)
                runs = await self._policies(runner, limit, len(load.arrivals))
            finally:
                await admin.set_policy(before)
                await admin.clear_caches()
                await runner.forget()
        settings = {
            "seed": self._flags.seed,
            "tenants": TENANTS,
            "turns": len(load.conversations[0].questions),
            "system_tokens": SYSTEM_TOKENS,
            "max_tokens": load.max_tokens,
            "cache_blocks_per_replica": limit,
            "requests_per_s": rate,
            "utilisation_without_cache": self._flags.load,
            "replicas": len(replicas),
        }
        result = summary(runs, settings)
        plot(runs, result, self._flags.plot)
        return result

    async def _paced(
        self, runner: DemoRunner, admin: AdminClient, load: Load, replicas: int
    ) -> tuple[Load, float]:
        """The arrivals, at a rate that follows from how fast this machine is when cold."""
        cold_s = math.inf
        self._say(f"{COLD_TRIES} requests on empty caches first: they set the pace")
        for _ in range(COLD_TRIES):
            await admin.clear_caches()
            cold_s = min(cold_s, await runner.cold_request_s())
        rate = self._flags.load * replicas / cold_s
        turns = arrivals(
            TENANTS,
            len(load.conversations[0].questions),
            requests_per_s=rate,
            seed=self._flags.seed,
        )
        self._say(f"one cold request takes {cold_s:.2f} s: {rate:.2f} requests/s")
        return dataclasses.replace(load, arrivals=turns), rate

    def _say(self, line: str) -> None:
        """What goes on, beside the figures."""
        print(line, file=sys.stderr, flush=True)

    async def _policies(self, runner: DemoRunner, limit: int, requests: int) -> list[PolicyRun]:
        columns = (TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn())
        runs = []
        live = self._console.is_terminal
        columns += (TimeElapsedColumn(),)
        with Progress(*columns, console=self._console, disable=not live) as progress:
            for policy in self._flags.policies:
                task = progress.add_task(policy, total=requests)
                told = partial(progress.advance, task) if live else Lines(policy, requests)
                runs.append(await runner.run(policy, limit, told))
        return runs


def main(argv: Sequence[str]) -> int:
    """Run, print, write. Exit status 1 when a request failed."""
    flags = _parser().parse_args(argv)
    console = Console()
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: the cluster gets back what it had
        signal.signal(number, signal.default_int_handler)
    result = asyncio.run(Demo(flags, console).run())
    print_table(result, console)
    console.print(f"plot: {flags.plot}")
    if flags.json:
        flags.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(any(of["errors"] for of in result["policies"].values()))
