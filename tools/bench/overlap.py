"""What planning ahead brings: the real engine thread and model, with and without, in turn."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from threading import Event

from configs.schema import ReplicaConfig
from events.request import SamplingParams
from kvstore.identity import KeyChain
from replica.engine.loop import EngineThread
from replica.engine.messages import EngineRequest, StepOutput
from replica.sched.plan import ChildId, ExecutionPlan, ExecutionResult, Runner

ROWS = 16
PROMPT_TOKENS = 16
STEPS = 32
ROUNDS = 4
_KEY = b"k" * 32


@dataclass(frozen=True, slots=True)
class Outcome:
    """Medians over the rounds, for one decode step of ROWS rows: elapsed, and the process's CPU."""

    wall_ms: float
    cpu_ms: float


class _Kept:
    """A runner that outlives the engines that use it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.total_blocks = runner.total_blocks
        self.block_tokens = runner.block_tokens

    def execute(self, plan: ExecutionPlan) -> ExecutionResult:
        return self._runner.execute(plan)

    def close(self) -> None:
        """Whoever built the runner closes it."""


class _Ends:
    """Counts the children that are still open."""

    def __init__(self) -> None:
        self.all = Event()
        self._open = ROWS

    def __call__(self, output: StepOutput) -> None:
        self._open -= sum(child.finish is not None for child in output.children)
        if not self._open:
            self.all.set()


def measure(runner: Runner) -> dict[str, Outcome]:
    """`off` and `on`, in turn, so that other work on the machine meets both."""
    _round(runner, False, 0)
    rounds = [
        (_round(runner, False, 2 * turn + 1), _round(runner, True, 2 * turn + 2))
        for turn in range(ROUNDS)
    ]
    return {
        name: Outcome(median(wall for wall, _ in part), median(cpu for _, cpu in part))
        for name, part in zip(("off", "on"), zip(*rounds, strict=True), strict=True)
    }


def _round(runner: Runner, overlap: bool, turn: int) -> tuple[float, float]:
    """ms of a step: elapsed, and CPU of the process."""
    ends = _Ends()
    config = ReplicaConfig(id="bench", max_running=ROWS, overlap=overlap)
    engine = EngineThread(_Kept(runner), ends, config, _KEY)
    engine.start()
    wall, cpu = time.perf_counter(), time.process_time()
    for row in range(ROWS):
        engine.submit(_request(turn * ROWS + row + 1))
    if not ends.all.wait(300.0):
        raise RuntimeError("the engine doesn't get on")
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    engine.close()
    return 1e3 * wall / STEPS, 1e3 * cpu / STEPS


def _request(child: int) -> EngineRequest:
    return EngineRequest(
        child=ChildId(child),
        prompt=tuple((child * 7_919 + place) % 49_000 for place in range(PROMPT_TOKENS)),
        chain=KeyChain(b"", child.to_bytes(16, "little")),
        params=SamplingParams(max_tokens=STEPS, seed=0, temperature=0.0, ignore_eos=True),
        seed=0,
        eos_ids=frozenset(),
        tenant="bench",
        arrival_s=time.monotonic(),
    )
