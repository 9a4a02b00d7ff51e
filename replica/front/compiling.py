"""Grammars on their way to the engine: compiled in threads, while the event loop goes on.

A request waits here between its registration and its submission. It may end meanwhile like any
other (abort, deadline, lost link); then what was compiled for it is thrown away. Bounded in
requests and in time. Tenants take turns, so that nobody's heavy formats keep the others waiting;
what was compiled before doesn't wait at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from events.errors import CoreError, UserError
from events.grammar import Grammar
from events.output import FINISH_ERROR
from replica.front.attempts import Attempt, Attempts
from replica.front.turns import Turns
from replica.grammar.compiler import GrammarCompiler
from replica.grammar.state import GrammarState

log = logging.getLogger(__name__)

THREADS = 2
MAX_COMPILING = 64
MAX_COMPILE_S = 10.0

TOO_SLOW = CoreError(
    status=503,
    type="server_error",
    code="grammar_timeout",
    message="The output format was not ready in time.",
    retry_after_s=1.0,
)
FULL = CoreError(
    status=429,
    type="server_error",
    code="queue_full",
    message="Too many output formats are being prepared.",
    retry_after_s=1.0,
    reroute=True,
)
BROKEN = CoreError(
    status=500,
    type="server_error",
    code="internal_error",
    message="The output format could not be prepared.",
)

Submit = Callable[[Mapping[int, GrammarState]], None]
"""Takes the state of each child, by its index."""


@dataclass(frozen=True, slots=True)
class Order:
    """A registered attempt's grammar, and what to do with a state behind each of `outputs` (by
    child's index)."""

    attempt: Attempt
    tenant: str
    grammar: Grammar
    scope: bytes
    outputs: Mapping[int, Sequence[int]]
    submit: Submit


class Compiling:
    """On the event loop; only `_work` runs in a thread."""

    def __init__(self, compiler: GrammarCompiler, attempts: Attempts) -> None:
        self._compiler = compiler
        self._attempts = attempts
        self._turns: Turns[Order] = Turns(THREADS, MAX_COMPILING)
        self._timers: dict[Attempt, asyncio.TimerHandle] = {}
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")

    def __len__(self) -> int:
        return len(self._turns)

    def begin(self, order: Order) -> None:
        """Submit it, now or later, or end its attempt with an error."""
        states = None
        if not any(order.outputs.values()):
            states = self._compiler.known(order.grammar, len(order.outputs), order.scope)
        if states is not None:
            order.submit(dict(zip(order.outputs, states, strict=True)))
        elif self._turns.add(order.tenant, order):
            attempt, loop = order.attempt, asyncio.get_running_loop()
            self._timers[attempt] = loop.call_later(
                MAX_COMPILE_S, self._attempts.end, attempt, FINISH_ERROR, TOO_SLOW
            )
            self._start_next()
        else:
            self._attempts.end(order.attempt, FINISH_ERROR, FULL)

    def close(self) -> None:
        """What has not begun never will."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start_next(self) -> None:
        while (turn := self._turns.next()) is not None:
            tenant, order = turn
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._pool, self._work, order)
            work.add_done_callback(partial(self._done, tenant, order))

    def _done(
        self, tenant: str, order: Order, future: asyncio.Future[dict[int, GrammarState]]
    ) -> None:
        self._turns.done(tenant)
        self._timers.pop(order.attempt).cancel()
        if not future.cancelled():
            self._finish(order, future)
            self._start_next()

    def _work(self, order: Order) -> dict[int, GrammarState]:
        if not order.attempt.children:
            return {}
        outputs = order.outputs
        states = self._compiler.states(order.grammar, list(outputs.values()), order.scope)
        return dict(zip(outputs, states, strict=True))

    def _finish(self, order: Order, future: asyncio.Future[dict[int, GrammarState]]) -> None:
        error = future.exception()
        if error is None:
            if order.attempt.children:
                order.submit(future.result())
        elif isinstance(error, UserError):
            self._attempts.refuse(order.attempt, error.error)
        else:
            log.error("a grammar was not compiled: %s", type(error).__name__)
            self._attempts.end(order.attempt, FINISH_ERROR, BROKEN)
