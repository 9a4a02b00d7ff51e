"""Grammars on their way to the engine: compiled in threads, while the event loop goes on.

A request waits here between its registration and its submission. It may end meanwhile like any
other (abort, deadline, lost link); then what was compiled for it is thrown away. Bounded in
requests and in time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from events.errors import CoreError, UserError
from events.grammar import Grammar
from events.output import FINISH_ERROR
from replica.front.attempts import Attempt, Attempts
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


class Compiling:
    """On the event loop; only `_work` runs in a thread."""

    def __init__(self, compiler: GrammarCompiler, attempts: Attempts) -> None:
        self._compiler = compiler
        self._attempts = attempts
        self._pending = 0
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")

    def __len__(self) -> int:
        return self._pending

    def begin(
        self,
        attempt: Attempt,
        grammar: Grammar,
        scope: bytes,
        outputs: Mapping[int, Sequence[int]],
        submit: Submit,
    ) -> None:
        """Call `submit` with a state behind each of `outputs` (by child's index), or end the
        registered attempt with an error."""
        if self._pending >= MAX_COMPILING:
            self._attempts.end(attempt, FINISH_ERROR, FULL)
            return
        loop = asyncio.get_running_loop()
        self._pending += 1
        timer = loop.call_later(MAX_COMPILE_S, self._attempts.end, attempt, FINISH_ERROR, TOO_SLOW)
        work = loop.run_in_executor(self._pool, self._work, attempt, grammar, scope, outputs)

        def done(future: asyncio.Future[dict[int, GrammarState]]) -> None:
            self._pending -= 1
            timer.cancel()
            self._finish(attempt, future, submit)

        work.add_done_callback(done)

    def close(self) -> None:
        """What has not begun never will."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _work(
        self,
        attempt: Attempt,
        grammar: Grammar,
        scope: bytes,
        outputs: Mapping[int, Sequence[int]],
    ) -> dict[int, GrammarState]:
        if not attempt.children:
            return {}
        states = self._compiler.states(grammar, list(outputs.values()), scope)
        return dict(zip(outputs, states, strict=True))

    def _finish(
        self, attempt: Attempt, future: asyncio.Future[dict[int, GrammarState]], submit: Submit
    ) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            if attempt.children:
                submit(future.result())
        elif isinstance(error, UserError):
            self._attempts.refuse(attempt, error.error)
        else:
            log.error("a grammar was not compiled: %s", type(error).__name__)
            self._attempts.end(attempt, FINISH_ERROR, BROKEN)
