"""`warmroute warm FILE`: make prompts warm for a tenant on k replicas, and prove it by a probe.

FILE holds JSON lines, each either {"messages": [...]} or {"prompt": "..."}; "-" reads standard
input. With --public the prompts become heads that every tenant shares, until --withdraw NAME.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from tools.errors import CommandError
from tools.flags import output_file, positive
from tools.local import admin_of

MAX_FILE_BYTES = 64 * 1024 * 1024


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warmroute warm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="the prompts, one JSON object a line"
    )
    parser.add_argument(
        "--tenant", default="default", help="whose cache scope to warm (default: default)"
    )
    parser.add_argument(
        "--replicas", type=positive, default=1, metavar="K", help="on how many (default: 1)"
    )
    parser.add_argument("--public", action="store_true", help="register as heads that all share")
    parser.add_argument(
        "--withdraw",
        metavar="NAME",
        action="append",
        default=[],
        help="a head that nobody shares any more, as --public named it; may be repeated",
    )
    parser.add_argument("--url", help="the gateway (default: the one that `warmroute up` started)")
    parser.add_argument("--state", type=Path, help="state folder of the cluster")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write what the probes found here"
    )
    return parser


def read_prompts(path: str, also: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The prompts of a file, with the parameters `also` where a line has them.

    Raises CommandError that names the line, never its content.
    """
    if path == "-":
        data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    else:
        try:
            with Path(path).open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise CommandError(f"{path} is over {MAX_FILE_BYTES} bytes")
    prompts = []
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            prompts.append(_prompt(line, f"{path}, line {number}", ("messages", "prompt", *also)))
    if not prompts:
        raise CommandError(f"{path} holds no prompt")
    return prompts


def _prompt(line: bytes, where: str, names: tuple[str, ...]) -> dict[str, Any]:
    try:
        prompt = json.loads(line)
    except (ValueError, RecursionError):
        raise CommandError(f"{where}: not JSON") from None
    if not isinstance(prompt, dict) or not ({"messages", "prompt"} & prompt.keys()):
        raise CommandError(f'{where}: needs "messages" or "prompt"')
    return {key: prompt[key] for key in names if key in prompt}


async def _warm(flags: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    probes = []
    columns = (TextColumn("warming"), BarColumn(), MofNCompleteColumn())
    async with aiohttp.ClientSession() as session:
        admin = admin_of(session, flags.state, flags.url)
        for name in flags.withdraw:
            await admin.withdraw_prefix(name)
            console.print(f"{name} is shared no more")
        if flags.file is None:
            return []
        prompts = read_prompts(flags.file, ("model",))
        with Progress(*columns, console=console) as progress:
            for prompt in progress.track(prompts):
                if flags.public:
                    # A head is shared for the model and for each of its adapters.
                    head = {key: of for key, of in prompt.items() if key != "model"}
                    progress.console.print(f"{await admin.publish_prefix(head)} is shared by all")
                body = {**prompt, "tenant": flags.tenant, "replicas": flags.replicas}
                probes.append(await admin.warm(body))
    return probes


def _table(probes: list[dict[str, Any]]) -> Table:
    table = Table("prompt", "replica", "prompt tokens", "cached tokens", title="what a probe finds")
    for number, probe in enumerate(probes, 1):
        for of in probe["replicas"]:
            table.add_row(
                str(number), of["replica"], str(of["prompt_tokens"]), str(of["cached_tokens"])
            )
    return table


def main(argv: Sequence[str]) -> int:
    """Warm, then show the probes. Exit status 1 when a probe found nothing cached. Raises
    CommandError."""
    flags = _parser().parse_args(argv)
    if flags.file is None and not flags.withdraw:
        raise CommandError("give a FILE of prompts, or --withdraw NAME")
    console = Console()
    probes = asyncio.run(_warm(flags, console))
    if flags.file is None:
        return 0
    console.print(_table(probes))
    if flags.json:
        flags.json.write_text(json.dumps(probes, indent=2) + "\n")
    found = [of["cached_tokens"] for probe in probes for of in probe["replicas"]]
    if found and min(found) == 0:
        console.print(
            "Some prompt is not warm: it is too short (whole blocks are kept) or evicted."
        )
    return int(not found or min(found) == 0)
