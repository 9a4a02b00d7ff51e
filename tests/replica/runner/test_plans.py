"""Nothing enters a plan that the worker can't run: every plan of random schedules, made a batch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from replica.lora.weights import AdapterWeights
from replica.runner.batch import build_batch, row_order
from replica.sched.plan import PENDING, ExecutionPlan
from replica.sched.policies import POLICIES
from tests.fakes.adapter_loader import FakeAdapters
from tests.fakes.grammar import FakeGrammar
from tests.replica.sched.rig import VOCAB, Bench, sampling, tokens_of

CONTEXT = 48
NAMES = ("", "", "a", "b", "c")


class Checked(Bench):
    """Holds every plan against all budgets at once, and makes it the worker's tensors."""

    def __init__(self, rng: random.Random) -> None:
        self.fake = FakeAdapters(*NAMES[2:])
        super().__init__(
            rng.choice((14, 24, 64)),
            4,
            max_step_tokens=rng.choice((5, 16, 40)),
            max_running=rng.choice((2, 6)),
            context_tokens=CONTEXT,
            horizon_tokens=rng.choice((1, 8)),
            retract_every_steps=rng.choice((0, 5)),
            itl_target_ms=rng.choice((0.0, 2.0)),
            policy=POLICIES[rng.choice(list(POLICIES))](),
            adapters=self.fake,
            max_adapters=2,
            max_adapters_per_batch=2,
        )
        self.plans = 0

    def check(self, plan: ExecutionPlan) -> None:
        limits, rows = self.limits, plan.rows
        self.plans += 1
        assert 0 < len(rows) <= limits.max_running
        assert len({row.child for row in rows}) == len(rows)
        assert plan.tokens <= limits.max_step_tokens
        assert len({row.adapter for row in rows} - {""}) <= limits.max_adapters_per_batch
        # Whose token is still in flight is filled in by the worker.
        filled = [
            replace(row, token_ids=tuple(0 if t == PENDING else t for t in row.token_ids))
            for row in rows
        ]
        build_batch(
            [filled[at] for at in row_order(filled)],
            blocks=limits.total_blocks,
            block_tokens=limits.block_tokens,
            context_tokens=CONTEXT,
            vocab=VOCAB,
            device=torch.device("cpu"),
            adapters={name: AdapterWeights(name, (), None, 0) for name in self.fake.resident},
        )
        for row in rows:
            if row.sample is not None and row.sample.grammar is not None:
                assert PENDING not in row.token_ids, "its mask needs the token in flight"

    def plan(self) -> ExecutionPlan | None:
        plan = super().plan()
        if plan is not None:
            self.check(plan)
        return plan


def add_some(bench: Checked, rng: random.Random, index: int) -> None:
    """Some can never run: too long for the context, or for the pool."""
    prompt = (*tokens_of(index % 4, rng.randint(0, 24)), *tokens_of(index, rng.randint(1, 30)))
    bench.add(
        prompt,
        sampling(rng.randint(1, 20)),
        adapter=rng.choice(NAMES),
        priority=rng.randint(0, 1),
        grammar=FakeGrammar(len(prompt), 9) if rng.random() < 0.2 else None,
    )


@pytest.mark.parametrize("seed", range(12))
def test_nothing_enters_a_plan_that_the_worker_can_not_run(seed: int) -> None:
    rng = random.Random(seed)
    bench = Checked(rng)
    for index in range(30):
        add_some(bench, rng, index)
        child = rng.randint(1, index + 1)
        lifecycle = bench.scheduler.lifecycle
        rng.choice((lifecycle.hold, lifecycle.resume, lifecycle.resume))(child)
        if rng.random() < 0.5:
            bench.fake.finish_all()
        plan = bench.plan() if rng.random() < 0.7 else None
        if plan is None:
            continue
        ahead = bench.scheduler.plan_ahead(bench.now_s) if rng.random() < 0.5 else None
        if ahead is not None:
            bench.check(ahead)
        bench.finish_step(plan)
        if ahead is not None and bench.scheduler.in_flight:
            bench.finish_step(ahead)
    for child in bench.specs:
        bench.scheduler.lifecycle.resume(child)
    bench.run()
    assert bench.plans > 20
    refused = [child for child in bench.specs if bench.finish(child) == "error"]
    for child in refused:
        error = bench.outputs[child][-1].error
        assert error is not None
        assert error.code in ("context_length_exceeded", "overloaded")
    bench.assert_right(*(bench.specs.keys() - set(refused)))
    bench.assert_empty()
