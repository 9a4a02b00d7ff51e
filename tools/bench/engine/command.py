"""The whole engine beside others on this machine: prefill and decode in tokens a second, and what
scheduler and output take of a decode step.

Ours is measured from a request's frame to its answer's frames; `transformers` by `generate`,
llama.cpp by its C interface, vLLM by its engine's steps. Each is a process of its own on one CPU,
with as many threads, asked in turn with the others. --ablate instead takes parts of ours away.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from configs.model.card import ModelCard, load_card
from configs.model.kept import has_q4
from configs.model.weights import open_weights
from tools.bench.engine.contest import Contender, Course, EngineError, Scores, run
from tools.bench.engine.entrants import PEERS, US, US_Q4, Entrant, ours, peers
from tools.bench.engine.export import export
from tools.errors import CommandError
from tools.fetch import default_model
from tools.flags import output_file, positive

OVERHEAD_ROWS = 16
SCREEN = "-"


def main(argv: Sequence[str]) -> int:
    """Run, print, write."""
    flags = _parser().parse_args(argv)
    model = flags.model or default_model()
    card = load_card(model)  # a file that can't be read is refused before anything starts
    if flags.ablate or flags.reference:
        found, show = _ablation(flags, card), _show_ablation
    else:
        with tempfile.TemporaryDirectory(prefix="wr-bench-") as folder, ExitStack() as stack:
            found, show = _contest(flags, model, Path(folder), stack), _show_contest
    if flags.json == SCREEN:
        print(json.dumps(found, indent=2))
        return 0
    show(found)
    if flags.json:
        Path(flags.json).write_text(json.dumps(found, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="warmroute bench engine", description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, help="GGUF file or folder; else the default model")
    add("--device", default="cpu")
    add("--dtype", default="auto")
    add("--kernel", default="auto")
    add("--threads", type=positive, default=1)
    add("--cpu", type=int, help="pin everybody to this one; else to the last one of ours")
    add("--rounds", type=positive, default=3)
    add("--context", type=positive, default=128, help="tokens before the decoded ones")
    add("--steps", type=positive, default=16, help="decode steps that are timed")
    add(
        "--peer",
        action="append",
        default=[],
        type=_peer,
        metavar="NAME=PATH",
        help=f"where one of {', '.join(PEERS)} is: a Python, an environment's folder, or the "
        "folder of llama.cpp's library; others are taken where they are found",
    )
    add("--alone", action="store_true", help="without peers")
    add("--forward", action="store_true", help="also the forward pass alone, beside its ceiling")
    add("--ablate", action="store_true", help="instead: our engine with one switch at a time")
    add("--reference", action="store_true", help="as --ablate, with a row for eager, no cache")
    add(
        "--row",
        action="append",
        default=[],
        metavar="NAME",
        help="only this one of --ablate's, and any more that are named",
    )
    add("--json", nargs="?", const=SCREEN, type=_target, metavar="FILE", help="figures as JSON")
    return parser


def _peer(text: str) -> tuple[str, str]:
    name, equals, place = text.partition("=")
    if name not in PEERS or not equals:
        raise argparse.ArgumentTypeError(f"takes NAME=PATH, NAME one of {', '.join(PEERS)}")
    return name, place


def _target(text: str) -> str:
    return text if text == SCREEN else str(output_file(text))


def _ablation(flags: argparse.Namespace, card: ModelCard) -> dict[str, Any]:
    # Late: torch is not needed to ask others.
    from tools.bench.engine import ablate
    from tools.bench.engine.trials import REFERENCE, TRIALS

    rows = TRIALS | ({"reference": REFERENCE} if flags.reference else {})
    if unknown := set(flags.row) - set(rows):
        raise CommandError(f"--row takes {', '.join(rows)}; not {', '.join(sorted(unknown))}")
    rows = {name: trial for name, trial in rows.items() if not flags.row or name in flags.row}
    settings = {"device": flags.device, "dtype": flags.dtype, "threads": flags.threads}
    found = ablate.measure(card, settings, rows, flags.rounds, _say)
    about = {**settings, "rounds": flags.rounds, "load_average": os.getloadavg()[0]}
    loads = {name: asdict(trial.mix) for name, trial in rows.items()}
    return {"ablation": found, "workloads": loads, "settings": about}


def _show_ablation(found: Mapping[str, Any]) -> None:
    from tools.bench.engine import ablate

    ablate.show(found["ablation"], Console())


def _contest(
    flags: argparse.Namespace, model: Path, folder: Path, stack: ExitStack
) -> dict[str, Any]:
    course = Course(context=flags.context, steps=flags.steps, rounds=flags.rounds)
    words = {
        "model": str(model),
        "folder": str(folder),
        "threads": flags.threads,
        "rows": course.rows,
        "most_tokens": course.most_tokens,
        "kv_tokens": course.kv_tokens,
        "forward": flags.forward,
        "settings": {"device": flags.device, "kernel": flags.kernel},
    }
    about: dict[str, Any] = {}
    try:
        dense = ours(US, flags.dtype)
        us = _started(dense, flags, folder, stack)
        about[US] = us.load(_words_to(dense, words))
        dtype = about[US]["precision"]
        entrants = [ours(US_Q4, dtype)] if has_q4(open_weights(model)) else []
        entrants += [] if flags.alone else peers(dict(flags.peer), dtype)
        if any(not entrant.reads_file for entrant in entrants):
            export(model, folder)
        contenders, left_out = [us], {}
        for entrant in entrants:
            try:
                contender = _started(entrant, flags, folder, stack)
                about[entrant.name] = contender.load(_words_to(entrant, words))
                contenders.append(contender)
            except EngineError as error:
                left_out[entrant.name] = str(error).strip().splitlines()[-1]
                _say(f"{entrant.name} is left out: {left_out[entrant.name]}")
        scores = run(contenders, course, _say)
        forward = us.forward(flags.rounds) if flags.forward else None
    except EngineError as error:
        raise CommandError(str(error)) from error
    found = _figures(scores, about)
    found["settings"] = _settings(flags, course) | {"left_out": left_out}
    if forward is not None:
        found["forward"] = forward
    return found


def _words_to(entrant: Entrant, words: Mapping[str, Any]) -> dict[str, Any]:
    """What one is told to load."""
    settings = {**words["settings"], **entrant.settings}
    return {**words, "dtype": entrant.dtype, "library": entrant.library, "settings": settings}


def _started(
    entrant: Entrant, flags: argparse.Namespace, folder: Path, stack: ExitStack
) -> Contender:
    cpu = flags.cpu
    if cpu is None and flags.threads == 1:
        cpu = max(os.sched_getaffinity(0))
    threads = {name: str(flags.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    log = folder / f"{entrant.name}.log"
    return stack.enter_context(Contender(entrant.name, entrant.command, log, cpu, threads))


def _figures(scores: Mapping[str, Scores], about: Mapping[str, Any]) -> dict[str, Any]:
    """`us`, `us_q4` where the file has such weights, and each peer by name; `overhead_b16`;
    `ratios`: ours over each other's, and `ratios_q4` those of `us_q4`."""
    us = scores[US]
    found: dict[str, Any] = {
        name: {**about[name], **score.figures()} for name, score in scores.items()
    }
    if OVERHEAD_ROWS in us.overhead:
        found["overhead_b16"] = median(us.overhead[OVERHEAD_ROWS])
    for key, mine in (("ratios", US), ("ratios_q4", US_Q4)):
        if mine in scores:
            found[key] = {
                name: scores[mine].ratios(score) for name, score in scores.items() if name != mine
            }
    return found


def _settings(flags: argparse.Namespace, course: Course) -> dict[str, Any]:
    return {
        "threads": flags.threads,
        "context_tokens": course.context,
        "steps": course.steps,
        "rounds": course.rounds,
        "kernel": flags.kernel,
        "load_average": os.getloadavg()[0],
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show_contest(found: Mapping[str, Any]) -> None:
    for name, figures in found.items():
        if not isinstance(figures, dict) or "prefill" not in figures:
            continue
        print(f"{name} ({figures['version']}, {figures['precision']})")
        for task in ("prefill", "decode"):
            rates = "  ".join(f"{size}: {rate:.0f}" for size, rate in figures[task].items())
            print(f"  {task} tokens/s  {rates}")
        for mine, whose in (("ratios", "ours"), ("ratios_q4", "ours with 4-bit weights")):
            for task, ratios in found.get(mine, {}).get(name, {}).items():
                text = "  ".join(f"{size}: {ratio:.2f}" for size, ratio in ratios.items())
                print(f"  {whose} is faster, {task}  {text}")
    if "overhead_b16" in found:
        print(f"overhead of a decode step at batch 16: {found['overhead_b16']:.1%} of its CPU time")
    for name, value in found.get("forward", {}).items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        print(f"forward {name}: " + "  ".join(f"{key} {number:.5g}" for key, number in inner))
