"""The commit: the only writer of truth. One call per plan, in plan order, well or failed.

A good plan advances its rows, publishes the blocks that became full, and takes in the tokens. A
failed plan counts as nothing computed: its rows are tried again, each alone, and the one that fails
alone twice is refused. A row that is over meanwhile (aborted, past its deadline) is only settled.
"""

from __future__ import annotations

from collections.abc import Callable

from events.errors import CoreError, InvariantError
from events.output import FINISH_LENGTH, FINISH_STOP
from replica.cache.node import Node
from replica.engine.messages import ChildOutput
from replica.sched.ledger import Limits
from replica.sched.lifecycle import Lifecycle
from replica.sched.plan import (
    NOT_FINITE,
    NOTHING_LEFT,
    ExecutionPlan,
    ExecutionResult,
    PlanRow,
    RowResult,
)
from replica.sched.refusals import (
    adapter_not_finite,
    engine_failure,
    grammar_failure,
    nothing_left,
)
from replica.sched.request import Request, State
from replica.sched.tiers import StoredBlock

NextKey = Callable[[bytes, bytes], bytes]
"""(parent, tokens as u32 little endian) to the key of the next block."""

MAX_FAILURES = 4
"""At this many a request is refused. A plan that fails counts once for each of its rows, and twice
for a row that was alone in it; a suspect that succeeds alone starts from zero again."""


class Committer:
    """Applies results; the scheduler sees to it that each plan gets here once."""

    def __init__(self, limits: Limits, lifecycle: Lifecycle, next_key: NextKey) -> None:
        self._block_tokens = limits.block_tokens
        self._lifecycle = lifecycle
        self._next_key = next_key

    def commit(self, plan: ExecutionPlan, result: ExecutionResult) -> None:
        """Take in a result. Raises InvariantError when it isn't this plan's."""
        self._check(plan, result)
        self._lifecycle.cache.pool.lower_fence(plan.plan_id)
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            request = self._land(row)
            error = row_result.error
            if error is None and row.sample is not None and row_result.token_id is None:
                error = "no token for a sampled row"
            if error is not None:
                request.computed = request.committed
                self._lifecycle.refuse(request, _failure(request, error))
            else:
                self._advance(request, row, row_result)
            self._lifecycle.settle(request)

    def fail(self, plan: ExecutionPlan) -> None:
        """Nothing of the plan was computed; its rows are suspects."""
        self._lifecycle.cache.pool.lower_fence(plan.plan_id)
        for row in plan.rows:
            request = self._land(row)
            request.computed = request.committed
            request.failures += 2 if len(plan.rows) == 1 else 1
            if request.failures >= MAX_FAILURES:
                self._lifecycle.refuse(request, engine_failure())
            elif request.state in (State.RUNNING, State.HELD):
                request.suspect = True
            self._lifecycle.settle(request)

    def call_off(self, plan: ExecutionPlan) -> None:
        """The plan before it failed, so it was never executed; nobody is to blame."""
        self._lifecycle.cache.pool.lower_fence(plan.plan_id)
        for row in plan.rows:
            request = self._land(row)
            request.computed = request.committed
            self._lifecycle.settle(request)

    def _check(self, plan: ExecutionPlan, result: ExecutionResult) -> None:
        if result.plan_id != plan.plan_id:
            raise InvariantError(f"result of plan {result.plan_id} for plan {plan.plan_id}")
        if [row.child for row in plan.rows] != [row.child for row in result.rows]:
            raise InvariantError(f"the rows of plan {plan.plan_id} and of its result differ")

    def _land(self, row: PlanRow) -> Request:
        """The row is not in flight any more. A request is kept while it has rows in flight."""
        request = self._lifecycle.table.get(row.child)
        if request is None or request.incarnation != row.incarnation:
            raise InvariantError(f"child {row.child} left while a row of it was in flight")
        request.in_flight -= 1
        request.placeholders -= row.sample is not None
        return request

    def _advance(self, request: Request, row: PlanRow, result: RowResult) -> None:
        if row.start != request.committed:
            return  # It builds on a row that failed; its request is over.
        if request.suspect:
            request.suspect, request.failures = False, 0
        request.committed = row.start + len(row.token_ids)
        request.prompt_scores += result.scores
        self._publish(request)
        if row.sample is None or result.token_id is None:
            return
        # Known even to one that is over: a row in flight behind this one computed it.
        request.tokens.append(result.token_id)
        if not request.over:
            self._take_in(request, result, result.token_id)

    def take_loaded(self, request: Request, blocks: int) -> None:
        """`blocks` blocks behind its cached prefix came from a tier below, verified."""
        request.computed = request.committed = (len(request.nodes) + blocks) * self._block_tokens
        self._publish(request, loaded=True)

    def _publish(self, request: Request, loaded: bool = False) -> None:
        """Make the blocks visible that are full of committed tokens, prompt and output alike."""
        full = request.committed // self._block_tokens
        while len(request.nodes) < full and not request.sealed:
            index = len(request.nodes)
            tokens = self._block(request, index)
            if index == len(request.keys):
                request.next_parent = self._next_key(request.next_parent, tokens)
                request.keys.append(request.next_parent)
            parent = request.nodes[-1] if index else None
            node = self._lifecycle.cache.publish(
                parent,
                request.keys[index],
                tokens,
                request.blocks[index],
                request.spec.tenant,
                request.adapter,
            )
            if node is None:
                request.sealed = True
            else:
                request.nodes.append(node)
                self._offer(request, node, loaded)

    def _offer(self, request: Request, node: Node, loaded: bool) -> None:
        """A block that was computed here may be of use in the tiers below."""
        tiers = self._lifecycle.tiers
        if tiers is not None and not loaded and len(node.copies) == 1:
            tiers.stored(self._stored(request, len(request.nodes) - 1))

    def _stored(self, request: Request, index: int) -> StoredBlock:
        """A published block of it, as the tiers are told of it."""
        block, node, spec = request.blocks[index], request.nodes[index], request.spec
        return StoredBlock(
            tenant=spec.tenant,
            salt=spec.salt,
            public_cut_blocks=spec.public_cut_blocks,
            index=index,
            before=request.key_before(index),
            key=node.key,
            tokens=node.tokens,
            block=block,
            generation=self._lifecycle.cache.pool.generation(block),
            awaited=bool(spec.write_to),
            adapter=spec.adapter,
        )

    def _block(self, request: Request, index: int) -> bytes:
        start = index * self._block_tokens
        return request.tokens[start : start + self._block_tokens].tobytes()

    def _take_in(self, request: Request, result: RowResult, token_id: int) -> None:
        """Follow the grammar, if there is one, and tell. A grammar that can't go on ends the child
        with the token that completed it: that one is part of the text."""
        stopped, grammar = request.ends_with(token_id), request.spec.grammar
        if grammar is not None and not stopped and not grammar.advance((token_id,)):
            self._lifecycle.refuse(request, _failure(request))
            return
        whole = stopped or (grammar is not None and grammar.finished)
        self._emit(request, result, token_id, stopped, whole)

    def _emit(
        self, request: Request, result: RowResult, token_id: int, stopped: bool, whole: bool
    ) -> None:
        finish = FINISH_STOP if whole else FINISH_LENGTH if request.remaining <= 0 else None
        if request.spec.write_to and finish is not None:
            indexes = range(len(request.nodes))
            blocks = tuple([self._stored(request, index) for index in indexes])
            self._lifecycle.write_out(request, blocks)
            return
        output = ChildOutput(
            child=request.child,
            token_ids=(token_id,),
            logprobs=() if result.logprob is None else (result.logprob,),
            cached_tokens=request.cached_tokens,
            finish=finish,
            stop_token=token_id if stopped else None,
            scheduled_s=request.scheduled_s,
            recomputed_tokens=request.recomputed_tokens,
            prompt_logprobs=request.take_scores(),
        )
        if finish is None:
            self._lifecycle.outputs.append(output)
        else:
            self._lifecycle.end(request, output)


def _failure(request: Request, error: str = "") -> CoreError:
    """Why a row failed alone."""
    grammar = request.spec.grammar
    if grammar is not None and grammar.failed:
        return grammar_failure()
    if request.adapter and error == NOT_FINITE:
        return adapter_not_finite(request.adapter)
    return nothing_left() if error == NOTHING_LEFT else engine_failure()
