"""What the scheduler itself costs: CPU microseconds of plan and commit per step, without a model.

With --chunking also what a long prompt costs 16 others that decode, and with --overlap what
planning ahead brings, on the real model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from array import array
from dataclasses import asdict
from functools import partial

from configs.model.card import load_card
from configs.schema import ReplicaConfig
from events.garbage import settle_memory
from events.request import SamplingParams
from kvstore.identity import KeyChain, block_key
from replica.engine.messages import EngineRequest
from replica.runner.build import build_runner
from replica.sched.ledger import Limits
from replica.sched.plan import ChildId, ExecutionPlan, ExecutionResult, RowResult
from replica.sched.scheduler import Scheduler
from tools.bench import overlap
from tools.bench.chunking import ChunkingBench
from tools.fetch import default_model
from tools.flags import factor, output_file, positive

BLOCK_TOKENS = 16
_KEY = b"bench" * 4


NEW_TOKENS = 40
"""Of a prompt, behind a prefix that others have too."""

SHORT_TOKENS = 24
"""Answers to such prompts: in every step somebody ends, and somebody starts."""


def request_of(child: int, prompt_tokens: int, max_tokens: int) -> EngineRequest:
    """A child whose prompt nobody else has."""
    prompt = tuple((child * 7919 + place) % 49_152 for place in range(prompt_tokens))
    return _request(child, prompt, KeyChain(b"", child.to_bytes(16, "little")), max_tokens)


def _request(
    child: int, prompt: tuple[int, ...], chain: KeyChain, max_tokens: int
) -> EngineRequest:
    return EngineRequest(
        child=ChildId(child),
        prompt=prompt,
        chain=chain,
        params=SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0),
        seed=0,
        eos_ids=frozenset({2}),
        tenant="bench",
        arrival_s=float(child),
    )


def result_of(plan: ExecutionPlan) -> ExecutionResult:
    """Token 5 for everybody who asks."""
    rows = tuple(RowResult(row.child, None if row.sample is None else 5) for row in plan.rows)
    return ExecutionResult(plan_id=plan.plan_id, rows=rows, device_ms=20.0)


def timed_step(scheduler: Scheduler) -> tuple[float, float]:
    """Microseconds of one plan and of its commit."""
    begin = time.thread_time()
    plan = scheduler.plan(begin)
    planned = time.thread_time()
    if plan is None:
        raise RuntimeError("nothing to plan")
    result = result_of(plan)
    executed = time.thread_time()
    scheduler.commit(result)
    scheduler.take_outputs()
    return (planned - begin) * 1e6, (time.thread_time() - executed) * 1e6


def measure(rows: int, context: int, waiting: int, steps: int) -> list[tuple[float, float]]:
    """Decode steps of `rows` long requests, with `waiting` more in the queue."""
    limits = Limits(
        total_blocks=(context + steps + 64) // BLOCK_TOKENS * (rows + 2),
        block_tokens=BLOCK_TOKENS,
        context_tokens=1 << 20,
        max_running=rows,
        max_step_tokens=4_096,
        max_waiting_tokens=1 << 30,
    )
    scheduler = Scheduler(limits, next_key=partial(block_key, _KEY))
    for child in range(rows + waiting):
        scheduler.add(request_of(child, context, steps + 10))
    while len(scheduler.table.running) < rows or any(r.debt > 1 for r in scheduler.table.running):
        timed_step(scheduler)
    settle_memory()
    return [timed_step(scheduler) for _ in range(steps)]


def _chain_of(prompt: tuple[int, ...]) -> KeyChain:
    """The keys of its full blocks."""
    keys, last = [], b"root"
    for first in range(0, len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
        tokens = array("I", prompt[first : first + BLOCK_TOKENS]).tobytes()
        keys.append(last := block_key(_KEY, last, tokens))
    return KeyChain(b"".join(keys), last)


def measure_shared(
    rows: int, prefix: int, prefixes: int, waiting: int, steps: int
) -> list[tuple[float, float]]:
    """Steps of `rows` short answers, with `waiting` more in the queue; all their prompts begin with
    one of `prefixes` prefixes of `prefix` tokens each, which are computed by then."""
    heads = [request_of(head, prefix, 1).prompt for head in range(prefixes)]
    limits = Limits(
        total_blocks=2 * (prefixes * prefix + rows * 256) // BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        context_tokens=1 << 20,
        max_running=rows,
        max_step_tokens=4_096,
        max_waiting_tokens=1 << 40,
    )
    scheduler = Scheduler(limits, next_key=partial(block_key, _KEY))
    chains = [_chain_of(head) for head in heads]

    def add(child: int, max_tokens: int) -> None:
        head, chain = heads[child % prefixes], chains[child % prefixes]
        tail = tuple((child * 7919 + place) % 49_152 for place in range(NEW_TOKENS))
        scheduler.add(_request(child, head + tail, chain, max_tokens))

    for child in range(prefixes):
        add(child, 1)
    while scheduler.runnable:
        timed_step(scheduler)
    for child in range(prefixes, prefixes + waiting + rows + steps):
        # Those that start together don't all end together.
        add(child, 1 + child % SHORT_TOKENS if child < prefixes + rows else SHORT_TOKENS)
    settle_memory()
    return [timed_step(scheduler) for _ in range(steps)]


def measure_found(blocks: int, steps: int) -> list[tuple[float, float]]:
    """Steps in each of which one request starts, alone, behind `blocks` cached blocks, and ends."""
    tokens = (blocks + 1) * BLOCK_TOKENS
    limits = Limits(
        total_blocks=2 * blocks + 64,
        block_tokens=BLOCK_TOKENS,
        context_tokens=1 << 20,
        max_running=4,
        max_step_tokens=4_096,
        max_waiting_tokens=1 << 30,
    )
    scheduler = Scheduler(limits, next_key=partial(block_key, _KEY))
    prompt = request_of(0, tokens, 1).prompt
    chain = _chain_of(prompt)
    scheduler.add(_request(0, prompt, chain, 1))
    while scheduler.runnable:
        timed_step(scheduler)
    settle_memory()
    samples = []
    for child in range(1, steps + 1):
        scheduler.add(_request(child, prompt, chain, 1))
        samples.append(timed_step(scheduler))
    return samples


def quietest(rounds: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Of each step the least that it took: all rounds do the same, and what else runs on the
    machine costs CPU time too, by the cache."""
    return [
        (min(plan for plan, _ in step), min(commit for _, commit in step))
        for step in zip(*rounds, strict=True)
    ]


def costs(samples: list[tuple[float, float]]) -> dict[str, dict[str, float]]:
    """Median, p99 and most in microseconds."""
    return {
        name: {
            "p50_us": statistics.median(values),
            "p99_us": statistics.quantiles(values, n=100)[98],
            "max_us": max(values),
        }
        for name, values in zip(("plan", "commit"), zip(*samples, strict=True), strict=True)
    }


def on_the_model(flags: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The default model's figures; see tools.bench.chunking and tools.bench.overlap."""
    card = load_card(default_model())
    runner = build_runner(card, ReplicaConfig(id="bench", kv_blocks=1_024))
    found = {}
    if flags.overlap:
        ahead = overlap.measure(runner)
        found |= {f"overlap_{name}": asdict(outcome) for name, outcome in ahead.items()}
    if flags.chunking:
        modes = ChunkingBench(runner, card.shape.vocab).measure(flags.itl_target_ms)
        found |= {f"chunking_{name}": asdict(outcome) for name, outcome in modes.items()}
    runner.close()
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print one line for each figure."""
    parser = argparse.ArgumentParser(prog="warmroute bench sched", description=__doc__)
    for name, default in (
        ("rows", 32),
        ("context", 2_000),
        ("waiting", 200),
        ("steps", 400),
        ("rounds", 1),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument(
        "--shared",
        type=positive,
        metavar="TOKENS",
        help="prompts have prefixes of so many in common",
    )
    parser.add_argument("--prefixes", type=positive, default=8, help="different ones of them")
    parser.add_argument(
        "--found", type=positive, metavar="BLOCKS", help="one request a step finds so many blocks"
    )
    parser.add_argument("--chunking", action="store_true", help="also with the real model")
    parser.add_argument("--overlap", action="store_true", help="what planning ahead brings")
    parser.add_argument("--itl-target-ms", type=factor, default=200.0)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures here")
    flags = parser.parse_args(arguments)
    if flags.found:
        work = partial(measure_found, flags.found, flags.steps)
    elif flags.shared:
        shape = flags.rows, flags.shared, flags.prefixes, flags.waiting, flags.steps
        work = partial(measure_shared, *shape)
    else:
        work = partial(measure, flags.rows, flags.context, flags.waiting, flags.steps)
    found = costs(quietest([work() for _ in range(flags.rounds)]))
    if flags.chunking or flags.overlap:
        found |= on_the_model(flags)
    for name, values in found.items():
        print(f"{name:>15}  " + "  ".join(f"{key} {value:.4g}" for key, value in values.items()))
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
