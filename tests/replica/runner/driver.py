"""A tiny engine for tests: chunked prefill, then batched decode, with plans made by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from events.request import SamplingParams
from replica.sched.plan import (
    ChildId,
    ExecutionPlan,
    PlanId,
    PlanRow,
    RowResult,
    Runner,
    SampleSpec,
)

GREEDY = SamplingParams(max_tokens=64, seed=0, temperature=0.0)


@dataclass
class Child:
    """One sequence: what is known, and how much of it lies in the pool."""

    child: ChildId
    known: list[int]
    blocks: tuple[int, ...]
    params: SamplingParams = GREEDY
    prompt_tokens: int = 0
    computed: int = 0
    results: list[RowResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.known)

    @property
    def output(self) -> list[int]:
        return self.known[self.prompt_tokens :]

    def row(self, budget: int) -> PlanRow:
        """The next chunk, sampled where it reaches the last known token."""
        end = min(len(self.known), self.computed + budget)
        spec = None
        if end == len(self.known):
            spec = SampleSpec(params=self.params, seed=self.params.seed, position=end)
        return PlanRow(
            child=self.child,
            incarnation=0,
            start=self.computed,
            token_ids=tuple(self.known[self.computed : end]),
            block_ids=self.blocks,
            sample=spec,
        )


class Driver:
    """Runs children of one runner to their end; blocks are handed out and never taken back."""

    def __init__(self, runner: Runner, chunk: int = 512) -> None:
        self.runner = runner
        self.chunk = chunk
        self._plans: Iterator[int] = iter(range(1, 1_000_000))
        self._children: Iterator[int] = iter(range(1, 1_000_000))
        self._free = list(range(runner.total_blocks))

    def child(
        self, prompt: Sequence[int], output_tokens: int, params: SamplingParams = GREEDY
    ) -> Child:
        count = -(-(len(prompt) + output_tokens) // self.runner.block_tokens)
        blocks = tuple(self._free.pop() for _ in range(count))
        return Child(ChildId(next(self._children)), list(prompt), blocks, params)

    def release(self, child: Child) -> None:
        self._free.extend(child.blocks)

    def step(self, children: Sequence[Child]) -> list[RowResult]:
        """One plan with a row for each child: a chunk of the prompt, or one token."""
        rows = tuple(child.row(self.chunk) for child in children)
        plan = ExecutionPlan(PlanId(next(self._plans)), rows)
        result = self.runner.execute(plan)
        assert result.plan_id == plan.plan_id
        for child, row, outcome in zip(children, rows, result.rows, strict=True):
            assert outcome.child == child.child
            child.computed += len(row.token_ids)
            if outcome.token_id is not None:
                child.known.append(outcome.token_id)
                child.results.append(outcome)
        return list(result.rows)

    def generate(self, children: Sequence[Child], output_tokens: int) -> None:
        """Until each child has `output_tokens` more tokens; all run side by side."""
        while running := [each for each in children if len(each.output) < output_tokens]:
            self.step(running)


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    """The same parameters under another seed."""
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**{**fields, "seed": seed})
