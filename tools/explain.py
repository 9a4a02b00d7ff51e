"""`warmroute explain FILE`: where prompts would go now, and why. No request is sent.

FILE holds JSON lines as for `warmroute warm`, either {"messages": [...]} or {"prompt": "..."}, each
with "tools" and "max_tokens" where wanted; "-" reads standard input. Terms are in milliseconds:
the score is what the replica saves over an idle and empty one; the rest is what it costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tools.local import admin_of
from tools.warm import read_prompts

ALSO = ("model", "tools", "max_tokens")
TERMS = {
    "score": "score",
    "saved_prefill_ms": "saved prefill",
    "queue_ms": "queue",
    "prefill_ms": "prefill",
    "transfer_ms": "transfer",
    "decode_share_ms": "decode share",
    "harm_ms": "harm to others",
    "eviction_ms": "eviction",
    "overload_ms": "overload",
    "lateness_ms": "lateness",
}
MAX_COLUMNS = 6
SMALLEST_MS = 0.05
ALWAYS = ("score", "saved_prefill_ms", "queue_ms", "prefill_ms")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warmroute explain",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "file", metavar="FILE", nargs="?", help="the prompts, one JSON object a line"
    )
    asked.add_argument("--prompt", metavar="TEXT", help="one bare prompt instead of a file")
    parser.add_argument("--tenant", default="default", help="who would ask (default: default)")
    parser.add_argument("--url", help="the gateway (default: the one that `warmroute up` started)")
    parser.add_argument("--state", type=Path, help="state folder of the cluster")
    parser.add_argument("--json", action="store_true", help="print the answers as JSON lines")
    return parser


async def _ask(flags: argparse.Namespace) -> list[dict[str, Any]]:
    bare = flags.prompt is not None
    async with aiohttp.ClientSession() as session:
        admin = admin_of(session, flags.state, flags.url)
        prompts = [{"prompt": flags.prompt}] if bare else read_prompts(flags.file, ALSO)
        return [await admin.explain({**prompt, "tenant": flags.tenant}) for prompt in prompts]


def verdict(answer: dict[str, Any]) -> str:
    """The choice in one sentence."""
    prompt = f"{answer['prompt_tokens']:,} prompt tokens"
    if answer["replica"] is None:
        again = f"; ask again in {answer['retry_after_s']:.0f} s" if answer["retry_after_s"] else ""
        return f"Nobody can take these {prompt} now: {answer['reason']}{again}."
    first = _computed_by(answer["hand_off"])
    return (
        f"{first}{answer['replica']} would get it ({answer['reason']}; policy {answer['policy']}):"
        f" {answer['predicted_cached_tokens']:,} of {prompt} are cached there,"
        f" the first token comes after about {_time(answer['predicted_ttft_ms'])}."
    )


def _computed_by(hand_off: dict[str, Any] | None) -> str:
    """Who would compute it first, where replicas have roles."""
    if hand_off is None:
        return ""
    if "prefill" not in hand_off:
        return f"Nobody would compute it for another one ({hand_off['verdict']}). "
    return (
        f"{hand_off['prefill']} would compute it within {_time(hand_off['prefill_ms'])}"
        f" (cost {_time(hand_off['split_ms'])},"
        f" at one place for both {_time(hand_off['colocated_ms'])}). "
    )


def table(answer: dict[str, Any]) -> Table:
    """A column for each of the best candidates, the chosen one first. Terms that come to nothing
    for all are left out; a replica that was filtered out shows the filter and no terms."""
    candidates = answer["candidates"][:MAX_COLUMNS]
    drawn = Table("ms", box=SIMPLE_HEAD)
    for of in candidates:
        drawn.add_column(of["replica"], justify="right")
    for name, words in TERMS.items():
        if name in ALWAYS or any(abs(of[name]) >= SMALLEST_MS for of in candidates):
            drawn.add_row(
                words, *("" if of["filtered"] else f"{of[name]:.1f}" for of in candidates)
            )
    blocks = answer["prompt_blocks"]
    drawn.add_row("matched blocks", *(_matched(of, blocks) for of in candidates))
    drawn.add_row("trust", *(f"{of['trust']:.2f}" for of in candidates))
    for name in ("digest_age_ms", "load_age_ms"):
        words = name.removesuffix("_ms").replace("_", " ")
        drawn.add_row(words, *(_time(of[name]) for of in candidates))
    if any(of["pool"] for of in candidates):
        drawn.add_row("pool", *(of["pool"] for of in candidates))
    if any(of["filtered"] for of in candidates):
        drawn.add_row("filtered out", *(of["filtered"] or "" for of in candidates))
    if more := len(answer["candidates"]) - len(candidates):
        drawn.caption = f"and {more} more (--json shows them)"
    return drawn


def _matched(candidate: dict[str, Any], blocks: int) -> str:
    return "" if candidate["filtered"] else f"{candidate['overlap_blocks']} / {blocks}"


def _time(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1_000 else f"{ms / 1_000:.1f} s"


def main(argv: Sequence[str]) -> int:
    """Explain. Exit status 1 when some prompt could not be placed now."""
    flags = _parser().parse_args(argv)
    answers = asyncio.run(_ask(flags))
    console = Console()
    for answer in answers:
        if flags.json:
            print(json.dumps(answer))
        else:
            console.print(table(answer))
            console.print(verdict(answer), highlight=False, markup=False)
    return int(any(answer["replica"] is None for answer in answers))
