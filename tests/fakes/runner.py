"""A runner without a model: its KV pool holds (token, position) pairs, and its next token is a
function of the whole sequence that it reads back out of the pool. Wrong KV gives wrong tokens.

It also refuses what real KV would silently garble: history that was not there before the step, two
rows that write one block, a row that reads a block which another row writes.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Event

from replica.sched.plan import (
    PENDING,
    ChildId,
    ExecutionPlan,
    ExecutionResult,
    PlanRow,
    RowResult,
    SampleSpec,
)
from tests.fakes.grammar import FakeGrammar

NON_FINITE = "the logits are not finite"


class FakeRunnerError(RuntimeError):
    """A plan that real hardware would not survive, or a fault that the test asked for."""


@dataclass
class Faults:
    """What shall go wrong. `raise_on`: plan ids; `poison`: children that make any plan raise;
    `row_errors`: what to report for a child's rows; `gate`: plan id to an event that it waits for.
    """

    raise_on: set[int] = field(default_factory=set)
    poison: set[int] = field(default_factory=set)
    row_errors: dict[int, str] = field(default_factory=dict)
    gates: dict[int, Event] = field(default_factory=dict)
    always: bool = False


def next_token(
    tokens: Sequence[int], vocab: int, eos: int | None = None, spec: SampleSpec | None = None
) -> int:
    """The token behind `tokens`: greedy ignores the seed; `eos` comes now and then if given."""
    salt = spec.seed if spec is not None and spec.params.temperature > 0 else 0
    mix = zlib.crc32(array("I", tokens).tobytes(), salt & 0xFFFFFFFF)
    banned = set(spec.suppress_ids) if spec is not None else set()
    grammar = spec.grammar if spec is not None else None
    if eos is not None and eos not in banned and grammar is None and mix % 23 == 0:
        return eos
    choice = (mix >> 8) % vocab
    while choice in banned or choice == eos or (grammar and not grammar.allows(choice)):
        choice = (choice + 1) % vocab
    return choice


def adapted(tokens: Sequence[int], adapter: str) -> list[int]:
    """What the KV of these tokens holds when they are computed with an adapter."""
    mix = zlib.crc32(adapter.encode()) >> 9 if adapter else 0
    return [token ^ mix for token in tokens]


class FakeRunner:
    """See the module. `adapters`: names of those in memory, where there are any. `started` is set
    whenever a plan begins; `plans` counts those that were executed, `tokens` what they computed."""

    def __init__(
        self, total_blocks: int, block_tokens: int, vocab: int, eos: int | None = None
    ) -> None:
        self._total_blocks = total_blocks
        self._block_tokens = block_tokens
        self.vocab = vocab
        self.eos = eos
        self.faults = Faults()
        self.kv: list[list[tuple[int, int] | None]] = [
            [None] * block_tokens for _ in range(total_blocks)
        ]
        self.plans = self.tokens = 0
        self.last_plan = 0
        self.last_tokens: dict[ChildId, int | None] = {}
        self.closed = False
        self.started = Event()
        self.adapters: set[str] = set()
        self.device_ms: Callable[[ExecutionPlan], float] = lambda plan: 1.0 + 0.1 * plan.tokens

    @property
    def total_blocks(self) -> int:
        return self._total_blocks

    @property
    def block_tokens(self) -> int:
        return self._block_tokens

    def execute(self, plan: ExecutionPlan) -> ExecutionResult:
        self._check_order(plan)
        self.started.set()
        gate = self.faults.gates.get(plan.plan_id)
        if gate is not None and not gate.wait(20.0):
            raise FakeRunnerError("the test never opened the gate")
        self._raise_if_asked(plan)
        rows = [self._filled(row) for row in plan.rows]
        self._check_rows([row for row in rows if row is not None])
        for row in rows:
            if row is not None:
                self._write(row)
        self.plans += 1
        self.tokens += plan.tokens
        results = tuple(
            RowResult(asked.child, None, error="no token came before")
            if row is None
            else self._result(row)
            for asked, row in zip(plan.rows, rows, strict=True)
        )
        self.last_tokens = {result.child: result.token_id for result in results}
        return ExecutionResult(plan.plan_id, results, self.device_ms(plan))

    def _filled(self, row: PlanRow) -> PlanRow | None:
        """With the token that the plan before sampled; None when there was none."""
        if PENDING not in row.token_ids:
            return row
        if row.token_ids != (PENDING,):
            raise FakeRunnerError("only a row's single token may be pending")
        token = self.last_tokens.get(row.child)
        return None if token is None else replace(row, token_ids=(token,))

    def close(self) -> None:
        self.closed = True

    def _check_order(self, plan: ExecutionPlan) -> None:
        if self.closed or plan.plan_id <= self.last_plan or not plan.rows:
            raise FakeRunnerError(f"plan {plan.plan_id} can't be executed")
        self.last_plan = plan.plan_id

    def _raise_if_asked(self, plan: ExecutionPlan) -> None:
        faults = self.faults
        poisoned = any(row.child in faults.poison for row in plan.rows)
        if faults.always or poisoned or plan.plan_id in faults.raise_on:
            for row in plan.rows:  # A failed step may leave anything behind in its own blocks.
                self._write(row, garbage=True)
            raise FakeRunnerError("as ordered")

    def _check_rows(self, rows: Sequence[PlanRow]) -> None:
        writers: dict[int, ChildId] = {}
        for row in rows:
            if row.adapter and row.adapter not in self.adapters:
                raise FakeRunnerError(f"adapter {row.adapter} is not in memory")
            self._check_history(row)
            for block in self._written(row):
                if block in writers:
                    raise FakeRunnerError(f"two rows write block {block}")
                writers[block] = row.child
        for row in rows:
            for block in row.block_ids:
                if writers.get(block, row.child) != row.child:
                    raise FakeRunnerError(f"block {block} is read while another row writes it")

    def _check_history(self, row: PlanRow) -> None:
        end = row.start + len(row.token_ids)
        if not row.token_ids or end > len(row.block_ids) * self._block_tokens:
            raise FakeRunnerError("a row needs tokens, and blocks for all of them")
        if row.sample is not None and row.sample.position != end:
            raise FakeRunnerError("the sampled position is the one behind the row")
        grammar = None if row.sample is None else row.sample.grammar
        if isinstance(grammar, FakeGrammar) and grammar.position != end:
            raise FakeRunnerError("a grammar has to follow all tokens before it masks the next")
        for position in range(row.start):
            cell = self._cell(row, position)
            if cell is None or cell[1] != position:
                raise FakeRunnerError(f"position {position} was never computed")

    def _written(self, row: PlanRow) -> tuple[int, ...]:
        first = row.start // self._block_tokens
        last = (row.start + len(row.token_ids) - 1) // self._block_tokens
        return row.block_ids[first : last + 1]

    def _cell(self, row: PlanRow, position: int) -> tuple[int, int] | None:
        return self.kv[row.block_ids[position // self._block_tokens]][position % self._block_tokens]

    def _write(self, row: PlanRow, garbage: bool = False) -> None:
        for offset, token in enumerate(adapted(row.token_ids, row.adapter)):
            position = row.start + offset
            block = self.kv[row.block_ids[position // self._block_tokens]]
            block[position % self._block_tokens] = (-1 if garbage else token, position)

    def _result(self, row: PlanRow) -> RowResult:
        error = self.faults.row_errors.get(row.child)
        if error is not None or row.sample is None:
            return RowResult(child=row.child, token_id=None, error=error)
        end = row.start + len(row.token_ids)
        tokens = [cell[0] for at in range(end) if (cell := self._cell(row, at)) is not None]
        return RowResult(
            child=row.child, token_id=next_token(tokens, self.vocab, self.eos, row.sample)
        )
