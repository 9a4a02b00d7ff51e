"""An engine by script: what it answers, when, and from which thread is the test's choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from events.cache import CacheFact
from events.errors import CoreError
from events.load import DecodeFit, PrefillFit
from events.output import FINISH_ABORT, FINISH_STOP, TokenLogprob
from replica.engine.messages import (
    ChildOutput,
    EngineLoad,
    EngineRequest,
    StepOutput,
    StepSink,
)
from replica.sched.plan import ChildId, PlanId

OnSubmit = Callable[["ScriptedEngine", EngineRequest], None]


def never(engine: ScriptedEngine, request: EngineRequest) -> None:
    """Answer nothing by itself; aborts are answered."""


def inside(text: bytes) -> OnSubmit:
    """Answer completely inside submit: byte tokens, then "stop"."""

    def answer(engine: ScriptedEngine, request: EngineRequest) -> None:
        engine.step({request.child: text}, finish=FINISH_STOP)

    return answer


def refuse_from(nth: int) -> OnSubmit:
    """Raise at the n-th submit (from 0) and at later ones."""

    def answer(engine: ScriptedEngine, request: EngineRequest) -> None:
        if len(engine.requests) > nth:
            raise RuntimeError("the inbox is gone")

    return answer


class ScriptedEngine:
    """Implements Engine. `open` holds the children that have had no finish yet.

    `answers_aborts`: whether an abort is answered at once by a finish, as a real engine does at the
    next step; without it the test plays an engine that answers late or never.
    """

    def __init__(self, sink: StepSink, on_submit: OnSubmit = never, answers_aborts: bool = True):
        self.requests: list[EngineRequest] = []
        self.open: set[ChildId] = set()
        self.calls: list[tuple[str, ChildId]] = []
        self.steps = 0
        self.queued_prefill_tokens = 0
        self.alive = True
        self.limit_blocks: int | None = None
        self.submitted: Callable[[], None] = lambda: None
        self._sink = sink
        self._on_submit = on_submit
        self._answers_aborts = answers_aborts
        self._plans = count(1)

    def submit(self, request: EngineRequest) -> None:
        self.requests.append(request)
        self.open.add(request.child)
        self._on_submit(self, request)
        self.submitted()

    def abort(self, child: ChildId, answered: bool = False) -> None:
        self.calls.append(("stop" if answered else "abort", child))
        if self._answers_aborts and child in self.open:
            self.step({child: b""}, finish=FINISH_ABORT)

    def hold(self, child: ChildId) -> None:
        self.calls.append(("hold", child))

    def resume(self, child: ChildId) -> None:
        self.calls.append(("resume", child))

    def clear_cache(self, limit_blocks: int | None = None, below: bool = True) -> int:
        self.limit_blocks = limit_blocks
        return 7

    def drain_facts(self) -> list[CacheFact]:
        return []

    def load(self) -> EngineLoad:
        return EngineLoad(
            waiting=0,
            running=len(self.open),
            queued_prefill_tokens=self.queued_prefill_tokens,
            running_context_tokens=0,
            free_blocks=8,
            cached_blocks=0,
            total_blocks=8,
            step_ms=1.0,
            steps=self.steps,
            prefill=PrefillFit(0.0, 1.0, 0.0, 1.0),
            decode=DecodeFit(1.0, 0.0, 0.0, 1.0),
            seen={},
            prompt_tokens_total=0,
            cached_tokens_total=0,
            preemptions_total=0,
            last_step_s=0.0,
            alive=self.alive,
        )

    def step(
        self,
        tokens: dict[ChildId, Sequence[int]],
        finish: str | None = None,
        error: CoreError | None = None,
        stop_token: int | None = None,
        cached_tokens: int = 0,
        logprobs: bool = False,
    ) -> None:
        """One step that gave these tokens to these children; may be called on any thread."""
        self.steps += 1
        children = tuple(
            ChildOutput(
                child=child,
                token_ids=tuple(ids),
                logprobs=tuple(TokenLogprob(i, -float(i)) for i in ids) if logprobs else (),
                cached_tokens=cached_tokens,
                finish=finish,
                stop_token=stop_token,
                error=error,
            )
            for child, ids in tokens.items()
        )
        if finish is not None:
            self.open -= set(tokens)
        self._sink(StepOutput(PlanId(next(self._plans)), children))
