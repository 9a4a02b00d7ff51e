"""`warmroute bench live`: the same open-loop traffic for several servers, in turn, round by round.

Targets are our gateway (started here, unless --target is all that is asked for), other projects'
gateways before replicas of the same kind (--peer), and any OpenAI URL (--target).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from configs.model.card import load_card
from tools.bench.client import FULL_LENGTH
from tools.bench.live.figures import Slo, figures
from tools.bench.live.machine import CpuShare
from tools.bench.live.plan import Ask, Plan, Wording, asks, shortened, times, wording
from tools.bench.live.play import Played, play
from tools.bench.live.report import draw, print_table
from tools.bench.live.start import Wanted, started
from tools.bench.live.target import Target, first_model, target
from tools.bench.peers import PEERS
from tools.errors import CommandError
from tools.fetch import default_model
from tools.flags import (
    OWN_TIMES,
    add_keep_bins,
    factor,
    natural,
    output_file,
    pace,
    picture_file,
    positive,
)
from tools.sim.call import Trace, TraceError
from tools.sim.plot import require_matplotlib
from tools.sim.simulate import load_trace
from tools.up.command import DEFAULT_NAME

DEFAULT_TRACE = "groups:groups=8,prompts=4,system=640,question=64,output=16,rates=2,stage_s=20"
PROBES = 4
"""Requests, from short to long, that tell how long one takes alone and cold."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="warmroute bench live", description=__doc__)
    add = parser.add_argument
    add(
        "trace",
        nargs="?",
        default=DEFAULT_TRACE,
        help="as of `warmroute sim`: a file, or one made up (default: %(default)s)",
    )
    add(
        "--target",
        type=target,
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a server that runs, with ,key=... ,model=... ,replicas=N behind; may be repeated",
    )
    add(
        "--peer",
        choices=sorted(PEERS),
        action="append",
        default=[],
        help="start that one too, where it is installed; may be repeated",
    )
    add(
        "--peers",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="where peers are installed, if not here; may be repeated",
    )
    _add_load(parser.add_argument_group("the load"))
    _add_replicas(parser.add_argument_group("what is started"))
    add("--slo-ttft-ms", type=factor, default=2_000.0, metavar="MS", help="default: %(default)s")
    add("--slo-itl-ms", type=factor, metavar="MS", help="of a request's gaps, in the mean")
    add("--json", type=output_file, metavar="FILE", help="write the figures here")
    add("--plot", type=picture_file, metavar="FILE", help="draw the distributions")
    return parser


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--rounds", type=positive, default=3, help="of every target in turn (%(default)s)")
    add_keep_bins(group)
    add("--requests", type=positive, metavar="N", help="only the first ones of the trace")
    add(
        "--shorten",
        type=factor,
        default=1.0,
        metavar="F",
        help="divide all lengths, for models that are slow or take little (%(default)s)",
    )
    add("--arrivals", choices=("trace", "poisson", "constant"), default="trace")
    either = group.add_mutually_exclusive_group()
    either.add_argument("--rate", type=factor, metavar="R", help="requests a second")
    either.add_argument(
        "--load",
        type=pace,
        default=0.75,
        metavar="U",
        help="that as a multiple of what the replicas could answer one by one without any cache "
        f"(%(default)s); '{OWN_TIMES}': the trace's own times",
    )
    add("--warm-up", type=natural, default=4, metavar="N", help="requests before each round")
    add("--seed", type=int, default=1)
    add(
        "--body",
        type=_object,
        default=FULL_LENGTH,
        metavar="JSON",
        help="further fields of each request (default: %(default)s)",
    )


def _add_replicas(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", type=Path, help="a GGUF file or a folder (default: the default model); its "
        "tokenizer measures all texts")  # fmt: skip
    add("--replicas", type=positive, default=2, help="of ours, and behind each peer (%(default)s)")
    add(
        "--roles",
        type=_roles,
        metavar="P:D",
        help="ours once more, over P replicas for prefill and D for decode",
    )
    add("--kv-blocks", type=positive, default=2048, help="of each replica (%(default)s)")
    add("--threads", type=positive, default=1, help="of each replica (%(default)s)")


def _roles(text: str) -> tuple[int, int]:
    prefill, _, decode = text.partition(":")
    if not (prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode)):
        raise argparse.ArgumentTypeError("takes two numbers from 1 on, as in 1:2")
    return int(prefill), int(decode)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("takes a JSON object")
    return value


class LiveBench:
    """One run: the same plan for every target, round by round."""

    def __init__(self, flags: argparse.Namespace, trace: Trace, console: Console) -> None:
        self._flags = flags
        self._trace = trace
        self._console = console
        self._model: Path = (flags.model or default_model()).resolve()
        self._wording: Wording = wording(load_card(self._model))

    async def run(self, folder: Path) -> tuple[dict[str, Any], dict[str, list[Played]]]:
        """The figures as they are written, and the samples. Raises CommandError."""
        flags = self._flags
        wanted = Wanted(
            ours=bool(flags.peer or flags.roles) or not flags.target,
            peers=tuple(flags.peer),
            homes=tuple(flags.peers),
            replicas=flags.replicas,
            replica_settings={"kv_blocks": flags.kv_blocks, "threads": flags.threads},
            model=self._model,
            model_name=DEFAULT_NAME,
            folder=folder,
            roles=flags.roles,
        )
        async with started(wanted, lambda line: self._console.print(f"  {line}")) as mine:
            targets = [*mine, *[await _named(given) for given in flags.target]]
            if len({of.name for of in targets}) < len(targets):
                raise CommandError("two targets have the same name")
            return await self._measure(targets)

    async def _measure(
        self, targets: Sequence[Target]
    ) -> tuple[dict[str, Any], dict[str, list[Played]]]:
        flags = self._flags
        cold_s = await self._cold_s(targets[0])
        per_s = targets[0].replicas / cold_s
        rate = flags.rate or (flags.load and flags.load * per_s)
        rounds: dict[str, list[Played]] = {of.name: [] for of in targets}
        busy = CpuShare()
        for number in range(flags.rounds):
            at_s = times(self._trace, flags.arrivals, rate, flags.seed + number)
            planned = asks(self._trace.calls, at_s, self._wording.overhead_tokens)
            for of in targets:
                rounds[of.name].append(await self._round(number, of, planned))
        offered = len(at_s) / at_s[-1] if at_s[-1] else 0.0
        slo = Slo(flags.slo_ttft_ms, flags.slo_itl_ms or float("inf"))
        settings = self._settings(targets, slo) | {
            "requests_per_s": offered,
            "cold_request_s": cold_s,
            "utilisation": offered / per_s,
            "machine_cpu_share": busy.share(),
        }
        return {"settings": settings, "targets": figures(rounds, slo, flags.seed)}, rounds

    async def _cold_s(self, of: Target) -> float:
        """How long one request takes alone and cold, in the mean over short and long ones."""
        calls = sorted(self._trace.calls, key=lambda call: call.prompt_tokens)
        step = len(calls) / PROBES
        probes = [calls[int((number + 0.5) * step)] for number in range(PROBES)]
        planned = asks(probes, [0.0] * PROBES, self._wording.overhead_tokens)
        samples = (await self._in_turn("cold", of, planned)).samples
        if bad := [sample.error for sample in samples if sample.error]:
            raise CommandError(f"{of.name} answers nothing: {bad[0]}")
        return sum(sample.e2e_ms for sample in samples) / PROBES / 1e3

    async def _round(self, number: int, of: Target, planned: tuple[Ask, ...]) -> Played:
        """What was sent before the round has texts of its own, so that it warms no prefix."""
        name = f"{number}/{of.name}"
        if self._flags.warm_up:
            await self._in_turn(f"warm-up/{name}", of, planned[: self._flags.warm_up])
        with _progress(self._console, f"round {number + 1}, {of.name}", len(planned)) as tick:
            return await play(self._plan(name, of, planned), tick)

    async def _in_turn(self, name: str, of: Target, planned: tuple[Ask, ...]) -> Played:
        plan = self._plan(name, of, planned)
        return await play(msgspec.structs.replace(plan, in_turn=True), lambda: None)

    def _plan(self, name: str, of: Target, planned: tuple[Ask, ...]) -> Plan:
        return Plan(
            url=of.url,
            key=of.key,
            model=of.model,
            extra=self._flags.body,
            seed=f"{self._flags.seed}/{name}",
            words=self._wording.words,
            block_tokens=self._trace.block_tokens,
            asks=planned,
        )

    def _settings(self, targets: Sequence[Target], slo: Slo) -> dict[str, Any]:
        flags = self._flags
        return {
            "trace": self._trace.name,
            "requests": len(self._trace.calls),
            "rounds": flags.rounds,
            "shorten": flags.shorten,
            "arrivals": flags.arrivals,
            "seed": flags.seed,
            "warm_up": flags.warm_up,
            "slo": str(slo),
            "body": flags.body,
            "kv_blocks": flags.kv_blocks,
            "threads": flags.threads,
            "targets": {of.name: of.about for of in targets},
            "replicas": {of.name: of.replicas for of in targets},
            "warmroute": version("warmroute"),
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        }


async def _named(of: Target) -> Target:
    return of if of.model else replace(of, model=await first_model(of))


@contextmanager
def _progress(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    columns = (TextColumn("{task.description:>24}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def main(argv: Sequence[str]) -> int:
    """Run, print, write. Exit status 1 when a request failed. Raises CommandError."""
    flags = _parser().parse_args(argv)
    if flags.plot:
        require_matplotlib()
    console = Console()
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: what was started is stopped
        signal.signal(number, signal.default_int_handler)
    try:
        trace = shortened(load_trace(flags.trace, flags.keep_bins), flags.shorten, flags.requests)
        bench = LiveBench(flags, trace, console)
    except (TraceError, ValueError) as error:
        raise CommandError(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="warmroute-live-") as folder:
        result, rounds = asyncio.run(bench.run(Path(folder)))
    print_table(result, console)
    if flags.json:
        flags.json.write_text(json.dumps(result, indent=2) + "\n")
    if flags.plot:
        draw(rounds, flags.plot)
    return int(any(found["errors"] for found in result["targets"].values()))
