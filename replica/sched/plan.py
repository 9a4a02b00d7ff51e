"""The words between scheduler and runner: a frozen, numbered plan and its result.

Nothing but these crosses that seam. A plan is committed exactly once, in order, by its id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Protocol

from events.output import TokenLogprob
from events.request import SamplingParams
from replica.grammar.state import GrammarState

PlanId = NewType("PlanId", int)
ChildId = NewType("ChildId", int)
"""Engine-wide unique number of one child (one of `n`) of one attempt; never reused."""


PENDING = -1
"""In place of a token that the plan before samples for the same child: not known yet."""


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to sample after a row's last token.

    `position` is the absolute position of the token to be sampled: with `seed` it fixes the random
    numbers, so that batch order, preemption and replica make no difference. Histories are empty
    unless a penalty or a bad word needs them. `suppress_ids` can't be chosen (end tokens below
    `min_tokens`). `grammar` says what may be chosen at all; it stands still until the commit.
    """

    params: SamplingParams
    seed: int
    position: int
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    suppress_ids: tuple[int, ...] = ()
    grammar: GrammarState | None = None


@dataclass(frozen=True, slots=True)
class Scoring:
    """Tell the logprobs of `targets`, the tokens behind the row's first, second, ... one, each with
    so many `alternatives`."""

    targets: tuple[int, ...]
    alternatives: int


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Compute `token_ids` at positions start, start+1, ... of one child.

    `block_ids` is a snapshot of the block table that covers start + len(token_ids) positions.
    `sample` is None for a middle chunk: it can't be sampled. A row that was planned while the plan
    before it executes may have PENDING as its only token: the runner fills it in. `adapter` names
    the LoRA adapter that it is computed with, which is in memory; empty for none.
    """

    child: ChildId
    incarnation: int
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    sample: SampleSpec | None
    scoring: Scoring | None = None
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """One step. Rows touch only the request incarnation that they were planned for."""

    plan_id: PlanId
    rows: tuple[PlanRow, ...]

    @property
    def tokens(self) -> int:
        """Tokens computed by this plan."""
        return sum(len(row.token_ids) for row in self.rows)


NOTHING_LEFT = "no token is left to sample from"
NOT_FINITE = "the model gave logits that are not finite"
"""The error of a row whose own request bars every token."""


@dataclass(frozen=True, slots=True)
class RowResult:
    """`token_id` is None for a row without sampling. `scores`: what the row's scoring asked for.
    `error` isolates a culprit."""

    child: ChildId
    token_id: int | None
    logprob: TokenLogprob | None = None
    error: str | None = None
    scores: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """`rows` is parallel to the plan's rows. `device_ms`: forward and sampling together."""

    plan_id: PlanId
    rows: tuple[RowResult, ...]
    device_ms: float


class Runner(Protocol):
    """What executes plans, in order. Blocking; called from one thread at a time."""

    @property
    def total_blocks(self) -> int:
        """Blocks of the KV pool that may be planned; one more, the dump, exists for padding."""

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""

    def execute(self, plan: ExecutionPlan) -> ExecutionResult:
        """Raises on a failed execution; then nothing of the plan counts as computed.

        A row with PENDING whose child got no token from the plan before gets an error.
        """

    def close(self) -> None:
        """Free the device memory; idempotent."""
