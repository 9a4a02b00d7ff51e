"""A real engine thread over the fake runner, and a sink that tests can wait on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Condition

from configs.schema import ReplicaConfig
from events.request import SamplingParams
from replica.engine.loop import EngineThread
from replica.engine.messages import ChildOutput, EngineRequest, EngineTiers, StepOutput
from replica.sched.plan import ChildId, Runner
from tests.fakes.adapter_loader import FakeAdapters
from tests.fakes.runner import FakeRunner
from tests.replica.sched.rig import KEY, VOCAB, chain_of, plain_run, sampling

WAIT_S = 60.0


class Sink:
    """Keeps outputs by child; complains about anything behind a finish."""

    def __init__(self) -> None:
        self.outputs: dict[int, list[ChildOutput]] = {}
        self.faults: list[str] = []
        self.on_output: Callable[[StepOutput], None] | None = None
        self._changed = Condition()

    def __call__(self, step: StepOutput) -> None:
        with self._changed:
            for output in step.children:
                got = self.outputs.setdefault(output.child, [])
                if got and got[-1].finish is not None:
                    self.faults.append(f"child {output.child} went on behind its finish")
                got.append(output)
            self._changed.notify_all()
        if self.on_output is not None:
            self.on_output(step)

    def tokens(self, child: int) -> list[int]:
        return [token for output in self.outputs.get(child, ()) for token in output.token_ids]

    def ended(self, child: int) -> bool:
        return any(output.finish is not None for output in self.outputs.get(child, ()))

    def wait(self, done: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        with self._changed:
            assert self._changed.wait_for(done, timeout_s), "nothing came in time"

    def end_of(self, child: int, timeout_s: float = WAIT_S) -> ChildOutput:
        """The child's last output, once it is there."""
        self.wait(lambda: self.ended(child), timeout_s)
        return self.outputs[child][-1]


class EngineRig:
    """An engine thread with its sink; children are numbered by the rig."""

    def __init__(
        self,
        runner: Runner,
        block_tokens: int,
        *,
        tiers: EngineTiers | None = None,
        adapters: FakeAdapters | None = None,
        **settings: object,
    ) -> None:
        self.sink = Sink()
        if adapters is not None:
            assert isinstance(runner, FakeRunner)
            runner.adapters = adapters.resident
        self.block_tokens = block_tokens
        defaults = {"id": "r", "max_step_tokens": 32, "max_running": 8, "context_tokens": 4_000}
        config = ReplicaConfig(**{**defaults, **settings})
        self.engine = EngineThread(
            runner, self.sink, config, KEY, check=True, tiers=tiers, adapters=adapters
        )
        self.specs: dict[int, EngineRequest] = {}
        self._children = 0

    def request(
        self, prompt: Sequence[int], params: SamplingParams | None = None, **fields: object
    ) -> EngineRequest:
        self._children += 1
        child = ChildId(self._children)
        spec = EngineRequest(
            **{
                "child": child,
                "prompt": tuple(prompt),
                "chain": chain_of(prompt, self.block_tokens),
                "params": params or sampling(),
                "seed": 3,
                "eos_ids": frozenset(),
                "tenant": "t",
                "arrival_s": time.monotonic(),
                **fields,
            }
        )
        self.specs[child] = spec
        return spec

    def submit(
        self, prompt: Sequence[int], params: SamplingParams | None = None, **fields: object
    ) -> ChildId:
        spec = self.request(prompt, params, **fields)
        self.engine.submit(spec)
        return spec.child

    def assert_right(self, runner: FakeRunner, *children: int) -> None:
        for child in children:
            assert self.sink.end_of(child).finish == "length"
            assert self.sink.tokens(child) == plain_run(self.specs[child], runner)

    def assert_nothing_left(self) -> None:
        """After everybody has ended: no maps, no blocks in use, no complaint."""
        scheduler = self.engine.scheduler
        assert self.engine.open_children() == 0
        assert len(scheduler.table) == 0
        assert not scheduler.in_flight
        assert scheduler.cache.available == scheduler.limits.total_blocks
        assert self.sink.faults == []


@contextmanager
def running(
    total_blocks: int = 64, block_tokens: int = 4, **settings: object
) -> Iterator[tuple[EngineRig, FakeRunner]]:
    """A started engine; at the end it is closed, and nothing may be left."""
    runner = FakeRunner(total_blocks, block_tokens, VOCAB)
    rig = EngineRig(runner, block_tokens, **settings)
    rig.engine.start()
    try:
        yield rig, runner
    finally:
        rig.engine.close(WAIT_S)
    assert runner.closed
    for child in rig.specs:
        assert rig.sink.ended(child)
    assert rig.engine.open_children() == 0
    assert rig.sink.faults == []
