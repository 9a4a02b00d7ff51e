"""Executes plans: one forward pass, one sampling pass, one result with the plan's id.

Knows nothing of requests beyond the rows of the plan in hand; keeps no state but weights, KV, and
the tokens of the last plan, from which the next one may go on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from events.output import TokenLogprob
from kvstore.layout import Layout
from replica.lora.bank import AdapterBank
from replica.models.llama import Llama
from replica.runner.batch import NO_ADAPTERS, ForwardBatch, build_batch, row_order
from replica.runner.mover import PoolMover
from replica.runner.pending import LastTokens
from replica.runner.pool import KVPool
from replica.sampling.logits import Sampled, sample
from replica.sampling.scores import score
from replica.sched.plan import (
    NOT_FINITE,
    ExecutionPlan,
    ExecutionResult,
    PlanRow,
    RowResult,
    SampleSpec,
)

_UNFILLED = Sampled(None, error="the plan before gave no token to go on from")


class ModelRunner:
    """A `Runner` over one model and one pool, for use by one thread."""

    def __init__(
        self,
        model: Llama,
        pool: KVPool,
        *,
        vocab: int,
        context_tokens: int,
        device: torch.device,
        threads: int,
        adapters: AdapterBank | None = None,
    ) -> None:
        self.adapters = adapters
        self._model: Llama | None = model
        self._pool: KVPool | None = pool
        self._vocab = vocab
        self._context_tokens = context_tokens
        self._device = device
        self._threads = threads
        self._last = LastTokens()
        self._total_blocks = pool.blocks
        self._block_tokens = pool.block_tokens

    @property
    def total_blocks(self) -> int:
        """Blocks that may be planned; the dump comes on top."""
        return self._total_blocks

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""
        return self._block_tokens

    def execute(self, plan: ExecutionPlan) -> ExecutionResult:
        """Compute the plan's rows and sample where they ask for it.

        A row whose numbers are not finite gets an error, and no other row does. Raises PlanError
        for a plan that breaks an invariant, RuntimeError once closed, and what the device raises.
        """
        if self._model is None or self._pool is None:
            raise RuntimeError("the runner is closed")
        started = time.perf_counter()
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        filled = self._last.fill(plan.rows)
        rows = [row for row in filled if row is not None]
        order = row_order(rows)
        with torch.inference_mode():
            outcomes = self._run(self._model, self._pool, [rows[index] for index in order])
        by_child = {rows[at].child: outcome for at, outcome in zip(order, outcomes, strict=True)}
        results = tuple(_result(row, by_child.get(row.child, _UNFILLED)) for row in plan.rows)
        self._last.note(results)
        return ExecutionResult(
            plan_id=plan.plan_id,
            rows=results,
            device_ms=(time.perf_counter() - started) * 1e3,
        )

    def mover(self, layout: Layout) -> PoolMover:
        """What copies blocks of the pool; must be out of use when the runner is closed.

        Raises ValueError for a layout that is not the pool's, RuntimeError once closed.
        """
        if self._pool is None:
            raise RuntimeError("the runner is closed")
        return PoolMover(self._pool, layout)

    def close(self) -> None:
        """Let go of weights and KV."""
        self._model = None
        self._pool = None

    def _run(self, model: Llama, pool: KVPool, rows: Sequence[PlanRow]) -> list[Sampled]:
        if not rows:
            return []
        batch = self._batch(pool, rows)
        scored = any(row.scoring is not None for row in rows)
        hidden = model.forward(batch, pool.layers, every=scored)
        scores = _scores(model, batch, hidden, rows) if scored else {}
        if scored:
            hidden = hidden[batch.last]
        finite = hidden.isfinite().all(-1)
        samples = [(index, row.sample) for index, row in enumerate(rows) if row.sample]
        sampled = self._sample(model, hidden, samples, batch.singles)
        outcomes = [
            sampled.get(index, Sampled(None)) if is_finite else Sampled(None, error=NOT_FINITE)
            for index, is_finite in enumerate(finite.tolist())
        ]
        for index, found in scores.items():
            outcomes[index] = replace(outcomes[index], scores=found)
        return outcomes

    def _batch(self, pool: KVPool, rows: Sequence[PlanRow]) -> ForwardBatch:
        return build_batch(
            rows,
            blocks=pool.blocks,
            block_tokens=pool.block_tokens,
            context_tokens=self._context_tokens,
            vocab=self._vocab,
            device=self._device,
            adapters=NO_ADAPTERS if self.adapters is None else self.adapters.weights,
        )

    def _sample(
        self, model: Llama, hidden: Tensor, samples: list[tuple[int, SampleSpec]], singles: int
    ) -> dict[int, Sampled]:
        """Outcomes by row; the head runs for no other rows."""
        if not samples:
            return {}
        index = torch.tensor([row for row, _ in samples], device=hidden.device)
        first = sum(row < singles for row, _ in samples)
        outcomes = sample(model.logits(hidden[index], first), [spec for _, spec in samples])
        return {row: outcome for (row, _), outcome in zip(samples, outcomes, strict=True)}


def _scores(
    model: Llama, batch: ForwardBatch, states: Tensor, rows: Sequence[PlanRow]
) -> dict[int, tuple[TokenLogprob, ...]]:
    """By row, from the states of all tokens."""
    starts = batch.host_starts.tolist()
    return {
        index: score(states[start : start + len(row.scoring.targets)], row.scoring, model.logits)
        for index, (start, row) in enumerate(zip(starts, rows, strict=False))
        if row.scoring is not None
    }


def _result(row: PlanRow, outcome: Sampled) -> RowResult:
    return RowResult(
        child=row.child,
        token_id=outcome.token_id,
        logprob=outcome.logprob,
        error=outcome.error,
        scores=outcome.scores,
    )
