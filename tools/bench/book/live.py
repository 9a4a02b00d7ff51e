"""The live part of the book: gateways on this machine in turn, before replicas that compute."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.bench.book.files import OUT
from tools.bench.live.command import main as bench_live
from tools.bench.live.report import ROWS, cell
from tools.bench.live.start import ENGINES, OURS
from tools.bench.peers import PEERS, home_of
from tools.sim.plot import can_draw

LIVE = "live"
FLAGS = (
    "groups:groups=4,prompts=3,system=320,question=48,output=8,rates=2,stage_s=10",
    *("--replicas", "2", "--rounds", "2", "--load", "0.6", "--warm-up", "2"),
    *("--kv-blocks", "512", "--slo-ttft-ms", "2000"),
)
TTFT = "ttft_mean_ms"
CROWDED_SHARE = 0.9
ENGINE = " {} computes by itself, in one process over all CPUs: an engine, no gateway."
CROWDED = " On a machine this busy, what else ran on it moves these figures more than gateways do."

Found = dict[str, Any]


def run_live(folders: Sequence[Path]) -> None:
    """All peers that are installed here or in one of the folders. Raises CommandError."""
    installed = [name for name in PEERS if PEERS[name].command(home_of(name, folders))]
    flags = [flag for name in installed for flag in ("--peer", name)]
    flags += [flag for folder in folders for flag in ("--peers", str(folder))]
    drawn = ["--plot", str(OUT / f"{LIVE}.png")] if can_draw() else []
    bench_live([*FLAGS, *flags, *drawn, "--json", str(OUT / f"{LIVE}.json")])


def read_live() -> Found | None:
    """None where nobody was asked."""
    path = OUT / f"{LIVE}.json"
    return json.loads(path.read_text()) if path.exists() else None


def verdict(found: Found) -> str:
    """Which peers were faster than ours beyond doubt, in one sentence."""
    ahead = []
    for name, of in found["targets"].items():
        ratio = of["over_first"].get(TTFT) if name != OURS else None
        if ratio and ratio["high"] is not None and ratio["high"] < 1:
            value, low, high = (format(ratio[key], ".2f") for key in ("value", "low", "high"))
            ahead.append(f"{name} ({value} [{low}, {high}] of ours)")
    if not ahead:
        return "Live, no peer's mean TTFT is below ours beyond its 95 % interval."
    return f"Live, mean TTFT is lower with {', '.join(ahead)}."


def section(found: Found) -> list[str]:
    """Values with their intervals, and what was run."""
    of, targets = found["settings"], found["targets"]
    head = ["target", *(heading for heading, _, _ in ROWS), f"goodput ({of['slo']})"]
    head += ["TTFT over ours", "errors"]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    answered = {n: t for n, t in targets.items() if sum(t["errors"].values()) < t["requests"]}
    rows += [[name, *_cells(target)] for name, target in answered.items()]
    silent = [f"{n} ({t['errors']})" for n, t in targets.items() if n not in answered]
    return [
        "## Live: gateways in turn before two replicas that compute",
        f"`{of['trace']}: {of['requests']} requests x {of['rounds']} rounds each; "
        f"{of['requests_per_s']:.2f} requests/s, {of['utilisation']:.2f} of what the replicas "
        f"could answer one by one without any cache; {of['machine']}; seed {of['seed']}`",
        "Each target in turn, round by round, the same requests at the same times; in brackets "
        "95 % intervals. Peers stand before single-replica gateways of ours: one hop more. "
        f"Replicas and gateways shared the machine, whose CPUs were in use to "
        f"{of['machine_cpu_share']:.0%}, all that ran on it together."
        + "".join(ENGINE.format(name) for name in targets if name in ENGINES)
        + (CROWDED if of["machine_cpu_share"] > CROWDED_SHARE else ""),
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
        *([f"Not measured, as no request was answered: {', '.join(silent)}."] if silent else []),
        "\n".join(f"- {name}: `{about}`" for name, about in _about(of).items()),
    ]


def _cells(target: Mapping[str, Any]) -> list[str]:
    figures = [cell(target.get(key), form) for _, key, form in (*ROWS, ("", "slo_share", ".3f"))]
    ratio = cell(target["over_first"].get(TTFT), ".2f")
    return [*figures, ratio, str(sum(target["errors"].values()))]


def _about(of: Mapping[str, Any]) -> dict[str, str]:
    """Without paths and ports, which are of one run."""
    return {name: " ".join(map(_plain, said.split())) for name, said in of["targets"].items()}


def _plain(word: str) -> str:
    if "://" in word or word.startswith("/") or (word.isdecimal() and len(word) > 3):
        return "..."
    return word
