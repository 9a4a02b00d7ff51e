"""A request from a link becomes children of the engine, registered before any is submitted."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from events.errors import DRAINING, QUEUE_LONGER, CoreError, UserError
from events.output import FINISH_ABORT, FINISH_ERROR, CoreDelta, CoreFinish, Usage
from events.request import CoreRequest, SamplingParams
from kvstore.identity import KeyChain, Namespace, chain
from replica.engine.messages import Engine, EngineRequest
from replica.front.attempts import Attempt, AttemptKey, Attempts, Outlet
from replica.front.check import (
    MAX_CHILDREN,
    Ids,
    Limits,
    check_request,
    refuse,
)
from replica.front.child import Child
from replica.front.compiling import Compiling, Order
from replica.front.detokenise import Vocabulary
from replica.front.fence import RequestKey
from replica.front.mailbox import Mailbox
from replica.front.metrics import FrontCounters
from replica.front.output import INTERNAL
from replica.front.stream import TokenStream
from replica.grammar.compiler import GrammarCompiler
from replica.grammar.state import GrammarState
from replica.sched.plan import ChildId

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 4_096
MAX_LIVE_CHILDREN = 8_192
MAX_ATTEMPT_S = 3_600.0
REROUTE_ABOVE_MS = 500.0
REROUTE_FACTOR = 2.0
DEADLINE_GRACE_S = 1.0
"""The engine ends a child at its deadline; the front does so this much later if it didn't."""


@dataclass(frozen=True, slots=True)
class Served:
    """What requests are served with. `cluster_key` and `namespace` make the block keys. A mailbox
    holds up to `mailbox_bytes`, all of them `mailboxes_bytes`. Without a `compiler` no answer can
    be constrained."""

    limits: Limits
    vocabulary: Vocabulary
    eos_ids: frozenset[int]
    cluster_key: bytes
    namespace: Namespace
    mailbox_bytes: int
    mailboxes_bytes: int = 64 * 1024 * 1024
    compiler: GrammarCompiler | None = None


class Intake:
    """Validates, mints child ids, registers, submits. Runs on the event loop only."""

    def __init__(
        self,
        engine: Engine,
        attempts: Attempts,
        served: Served,
        counters: FrontCounters,
        clock: Callable[[], float],
    ) -> None:
        self.draining = False
        self._engine = engine
        self._attempts = attempts
        self._served = served
        self._counters = counters
        self._clock = clock
        self._child_ids = itertools.count(1)
        compiler = served.compiler
        self.compiling = None if compiler is None else Compiling(compiler, attempts)

    def submit(self, outlet: Outlet, request: CoreRequest) -> tuple[CoreDelta, ...]:
        """Take a request in. Returns the deltas that refuse it, none when it was accepted."""
        received_s = self._clock()
        try:
            said = self._pass_fence(request)
            if said is not None:
                return said
            self._check_door()
            ids = check_request(request, self._served.limits)
            self._check_grammar(request.sampling)
            self._check_room(request.sampling.n)
            self._check_queue(request.believed_queue_tokens)
            keys = self._chain(request)
            streams = self._streams(request, ids)
        except UserError as error:
            self._counters.refuse(error.error.code or "refused")
            return _refusal(request, error.error)
        attempt = self._register(outlet, request, streams, received_s)
        start = partial(self._start, attempt, request, ids, keys)
        if request.sampling.grammar is None or self.compiling is None:
            start({})
        else:
            outputs = {
                child.index: ids.outputs[child.index] or () for child in attempt.children.values()
            }
            grammar = request.sampling.grammar
            order = Order(attempt, request.tenant, grammar, request.salt, outputs, start)
            self.compiling.begin(order)
        return ()

    def _pass_fence(self, request: CoreRequest) -> tuple[CoreDelta, ...] | None:
        """What this attempt has said, if it was answered already; an earlier one ends here."""
        fence, key = self._attempts.fence, _request_key(request)
        said = fence.enter(key, request.attempt)
        earlier = fence.live(key)
        if said is None and earlier is not None:
            self._attempts.end(earlier, FINISH_ABORT)
        return said

    def _check_door(self) -> None:
        if self.draining:
            raise UserError(_try_elsewhere(503, DRAINING, "The replica is draining."))

    def _check_grammar(self, params: SamplingParams) -> None:
        if params.grammar is not None and self.compiling is None:
            refuse("This replica can't constrain answers.", param=params.grammar.param)

    def _check_room(self, children: int) -> None:
        """The engine bounds its queue in tokens; this bounds the tables of the front."""
        attempts = self._attempts
        if len(attempts) >= MAX_ATTEMPTS or attempts.live_children + children > MAX_LIVE_CHILDREN:
            raise UserError(_try_elsewhere(429, "queue_full", "The replica is full."))

    def _check_queue(self, believed_tokens: int | None) -> None:
        """Many routers can't know at once what each of them sends: where that went far wrong the
        request is better off elsewhere, once."""
        if believed_tokens is None:
            return
        load = self._engine.load()
        believed_ms = load.prefill.predict_ms(0, believed_tokens)
        queued_ms = load.prefill.predict_ms(0, load.queued_prefill_tokens)
        if queued_ms > REROUTE_ABOVE_MS + REROUTE_FACTOR * believed_ms:
            message = "The replica's queue is longer than was believed."
            raise UserError(_try_elsewhere(429, QUEUE_LONGER, message))

    def _chain(self, request: CoreRequest) -> KeyChain:
        served = self._served
        try:
            return chain(
                served.cluster_key,
                served.namespace.adapted(request.adapter),
                request.salt,
                request.prompt,
                request.public_cut_blocks,
            )
        except ValueError:
            refuse("The public prefix is longer than the prompt.")

    def _streams(self, request: CoreRequest, ids: Ids) -> dict[int, TokenStream]:
        """A stream for each child that has not finished, behind what it has put out elsewhere."""
        params, streams = request.sampling, {}
        for index, output in enumerate(ids.outputs):
            if output is not None:
                stream = TokenStream(self._served.vocabulary, params.stop, params.min_tokens)
                if not stream.replay(output):
                    refuse("The progress goes beyond a stop string.", param="progress")
                streams[index] = stream
        return streams

    def _register(
        self,
        outlet: Outlet,
        request: CoreRequest,
        streams: Mapping[int, TokenStream],
        received_s: float,
    ) -> Attempt:
        params = request.sampling
        attempt = Attempt(
            key=AttemptKey(outlet, request.request_id, request.attempt),
            request=_request_key(request),
            prompt_tokens=len(request.prompt) // 4,
            stop_token_ids=frozenset(params.stop_token_ids),
            received_s=received_s,
            mailbox=Mailbox(self._served.mailbox_bytes // 2, self._served.mailbox_bytes),
        )
        for index, stream in streams.items():
            child_id = ChildId(next(self._child_ids))
            attempt.children[child_id] = Child(child_id, index, attempt, stream)
        self._attempts.register(attempt, _patience_s(request))
        return attempt

    def _start(
        self,
        attempt: Attempt,
        request: CoreRequest,
        ids: Ids,
        keys: KeyChain,
        grammars: Mapping[int, GrammarState],
    ) -> None:
        """Submit the children; when one can't be, the whole attempt ends with an error."""
        try:
            for child in tuple(attempt.children.values()):
                grammar = grammars.get(child.index)
                self._engine.submit(self._engine_request(child, request, ids, keys, grammar))
                if attempt.holds:
                    self._engine.hold(child.id)
        except Exception as error:
            log.error("the engine did not take a request: %s", type(error).__name__)
            self._attempts.end(attempt, FINISH_ERROR, INTERNAL)

    def _engine_request(
        self,
        child: Child,
        request: CoreRequest,
        ids: Ids,
        keys: KeyChain,
        grammar: GrammarState | None,
    ) -> EngineRequest:
        received_s, budget_ms = child.attempt.received_s, request.e2e_deadline_ms
        first_ms = request.ttft_deadline_ms
        return EngineRequest(
            child=child.id,
            prompt=ids.prompt,
            chain=keys,
            params=request.sampling,
            seed=request.sampling.seed + child.index,
            eos_ids=self._served.eos_ids,
            tenant=request.tenant,
            arrival_s=received_s,
            priority=request.priority,
            weight=request.weight,
            itl_ms=request.itl_deadline_ms,
            first_by_s=None if first_ms is None else received_s + _bounded_s(first_ms),
            deadline_s=None if budget_ms is None else received_s + _bounded_s(budget_ms),
            router_boot=request.router_boot,
            dispatch_seq=request.dispatch_seq,
            output=ids.outputs[child.index] or (),
            salt=request.salt,
            public_cut_blocks=request.public_cut_blocks,
            warm_share=request.warm_share,
            grammar=grammar,
            write_to=request.write_to,
            adapter=request.adapter,
            skip_cache_read=request.sampling.prompt_logprobs is not None,
        )


def _request_key(request: CoreRequest) -> RequestKey:
    return RequestKey(request.router_boot, request.request_id)


def _patience_s(request: CoreRequest) -> float:
    if request.e2e_deadline_ms is None:
        return MAX_ATTEMPT_S
    return _bounded_s(request.e2e_deadline_ms) + DEADLINE_GRACE_S


def _bounded_s(budget_ms: float) -> float:
    """No budget is longer: the engine's thread can't sleep for as long as a float can say."""
    return min(MAX_ATTEMPT_S, budget_ms / 1e3)


def _try_elsewhere(status: int, code: str, message: str) -> CoreError:
    """Nothing was executed: another replica may be asked at once, this one after a while."""
    return CoreError(
        status=status,
        type="server_error",
        code=code,
        message=message,
        retry_after_s=1.0,
        reroute=True,
    )


def _refusal(request: CoreRequest, error: CoreError) -> tuple[CoreDelta, ...]:
    """One finish per child that was asked for, so that nobody waits for a sibling."""
    children = range(min(max(1, request.sampling.n), MAX_CHILDREN))
    finish = CoreFinish(reason=FINISH_ERROR, error=error)
    usage = Usage(len(request.prompt) // 4, 0, 0)
    return tuple(
        CoreDelta(request.request_id, request.attempt, index, "", (), (), usage, finish)
        for index in children
    )
