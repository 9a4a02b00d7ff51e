"""How fast the forward pass alone is on this machine, beside what the machine could do at most.

Prefill and decode through the real runner with plans made by hand, and the gain of a warm prefix.
CPU time is measured beside wall time, since other work on the machine stretches the latter. Each
figure is the best and the median of several rounds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import torch

from configs.model.shape import ModelShape
from events.request import SamplingParams
from replica.runner.runner import ModelRunner
from replica.sched.plan import ChildId, ExecutionPlan, PlanId, PlanRow, SampleSpec

CHUNK_TOKENS = 512
DECODE_CONTEXT = 256
DECODE_STEPS = 16
DECODE_ROWS = (1, 4, 16, 64)
KV_TOKENS = max(DECODE_ROWS) * (DECODE_CONTEXT + DECODE_STEPS)
"""What the runner's pool has to hold."""

SHARED_TOKENS = 1504
OWN_TOKENS = 40
GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Timing:
    """Best and median over the rounds, in ms: elapsed, and CPU time of the process."""

    wall_best_ms: float
    wall_median_ms: float
    cpu_best_ms: float
    cpu_median_ms: float


def timed(work: Callable[[], object], rounds: int) -> Timing:
    """`work` once to warm up, then `rounds` times."""
    work()
    walls, cpus = [], []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        cpus.append((time.process_time() - cpu) * 1e3)
        walls.append((time.perf_counter() - wall) * 1e3)
    return Timing(min(walls), median(walls), min(cpus), median(cpus))


class Bench:
    """One runner and random prompts; block 0 onwards belongs to row 0, then row 1, and so on."""

    def __init__(self, runner: ModelRunner, vocab: int) -> None:
        self._runner = runner
        self._vocab = vocab
        self._random = random.Random(0)
        self._plans = 0

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(self._vocab) for _ in range(count))

    def row(self, index: int, start: int, tokens: tuple[int, ...], span: int) -> PlanRow:
        """A row sampled at its end, in the index-th stretch of blocks for `span` tokens."""
        blocks = -(-span // self._runner.block_tokens)
        return PlanRow(
            child=ChildId(index),
            incarnation=0,
            start=start,
            token_ids=tokens,
            block_ids=tuple(range(index * blocks, (index + 1) * blocks)),
            sample=SampleSpec(params=GREEDY, seed=0, position=start + len(tokens)),
        )

    def execute(self, *rows: PlanRow) -> None:
        self._plans += 1
        result = self._runner.execute(ExecutionPlan(PlanId(self._plans), rows))
        errors = [row.error for row in result.rows if row.error]
        if errors:
            raise RuntimeError(errors[0])

    def prefill(self, tokens: tuple[int, ...], start: int = 0) -> None:
        """Tokens from `start` on, in chunks; the rest of the prompt is taken to be cached."""
        for first in range(start, len(tokens), CHUNK_TOKENS):
            self.execute(self.row(0, first, tokens[first : first + CHUNK_TOKENS], len(tokens)))

    def fill_contexts(self, rows: int, span: int) -> None:
        for index in range(rows):
            self.execute(self.row(index, 0, self.tokens(DECODE_CONTEXT), span))

    def decode(self, rows: int, span: int) -> None:
        """DECODE_STEPS steps of `rows` sequences; the tokens don't matter."""
        for step in range(DECODE_STEPS):
            at = DECODE_CONTEXT + step
            self.execute(*(self.row(row, at, self.tokens(1), span) for row in range(rows)))


def gemm_peak_gflops(dtype: torch.dtype, rounds: int) -> float:
    """The fastest of several matrix products, one thread as set: the most that could be reached."""
    best = 0.0
    for rows, depth, columns in ((512, 576, 1536), (512, 1536, 576), (1024, 1024, 1024)):
        x, weight = torch.randn(rows, depth).to(dtype), torch.randn(depth, columns).to(dtype)
        timing = timed(lambda x=x, weight=weight: torch.mm(x, weight), 4 * rounds)
        best = max(best, 2 * rows * depth * columns / timing.cpu_best_ms / 1e6)
    return best


def prefill_gflop(shape: ModelShape, tokens: int) -> float:
    """Work of a cold prefill: products and causal attention; the head once."""
    heads = shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    weights = shape.layers * shape.hidden * (heads + 3 * shape.intermediate)
    attention = shape.layers * 4 * shape.heads * shape.head_dim * tokens * (tokens + 1) / 2
    return (2 * weights * tokens + attention + 2 * shape.hidden * shape.vocab) / 1e9


def measure(runner: ModelRunner, shape: ModelShape, dtype: str, rounds: int) -> dict[str, object]:
    """All figures, as a tree of plain numbers."""
    bench = Bench(runner, shape.vocab)
    peak = gemm_peak_gflops(getattr(torch, dtype), rounds)
    found: dict[str, object] = {"gemm_peak_gflops": peak}
    for count in (512, 2048):
        tokens = bench.tokens(count)
        timing = timed(lambda tokens=tokens: bench.prefill(tokens), rounds)
        found[f"prefill_{count}"] = _rates(timing, count) | {
            "of_gemm_peak": prefill_gflop(shape, count) / timing.cpu_best_ms * 1e3 / peak
        }
    span = DECODE_CONTEXT + DECODE_STEPS
    for rows in DECODE_ROWS:
        bench.fill_contexts(rows, span)
        timing = timed(lambda rows=rows: bench.decode(rows, span), rounds)
        found[f"decode_{rows}"] = _rates(timing, rows * DECODE_STEPS)
    found["warm_prefix"] = _warm_prefix(bench, rounds)
    return found


def _rates(timing: Timing, tokens: int) -> dict[str, float]:
    """Tokens per second beside the times."""
    return asdict(timing) | {
        "tokens_per_s": tokens / timing.wall_best_ms * 1e3,
        "tokens_per_cpu_s": tokens / timing.cpu_best_ms * 1e3,
    }


def _warm_prefix(bench: Bench, rounds: int) -> dict[str, float]:
    """Time to the first token of a long prompt, with its shared head cached and not."""
    tokens = bench.tokens(SHARED_TOKENS + OWN_TOKENS)
    cold = timed(lambda: bench.prefill(tokens), rounds)
    warm = timed(lambda: bench.prefill(tokens, SHARED_TOKENS), rounds)
    return {
        "cold_ms": cold.cpu_best_ms,
        "warm_ms": warm.cpu_best_ms,
        "ratio": cold.cpu_best_ms / warm.cpu_best_ms,
    }
