"""A simulated fleet under the real queue and the real choice: replicas that take prompts one after
another, as fast as they say (or not quite), and report every quarter of a second.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from configs.schema import RouterConfig, TenantPolicy
from events.load import PrefillFit
from events.request import SamplingParams
from kvstore.identity import KeyChain
from router.choice.route import NoReplica, Outcome
from router.dispatch.job import Job
from router.tenancy.others import Others
from router.tenancy.tenants import Tenant
from router.waiting.queue import RequestQueue
from tests.router.kit import BLOCK_TOKENS, POOL, World, hello, load, prompt

REPORT_S = 0.25
DECODE_STEP_S = 0.01
_seeds = itertools.count(1)


@dataclass(slots=True)
class _Task:
    decision_id: str
    seq: int
    new_tokens: int
    answer_tokens: int
    first: asyncio.Event
    end: asyncio.Event


class Replica:
    """First come, first served, `max_running` at once; `slowness` 1.2: slower than it says."""

    def __init__(
        self, name: str, world: World, per_token_ms: float, max_running: int, slowness: float
    ) -> None:
        self.name = name
        self.waiting: deque[_Task] = deque()
        self.most_waiting = 0
        self.computed_tokens = 0
        self._world = world
        self._fit = PrefillFit(1.0, per_token_ms, 0.0, 1.0)
        self._slowness = slowness
        self._slots = asyncio.Semaphore(max_running)
        self._work = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._seen = 0
        self._now: _Task | None = None
        fleet = world.fleet
        fleet.on_hello(name, 1, hello(max_running=max_running))
        fleet.link_state(name, 1, True)
        self.report()
        self._tasks = [asyncio.create_task(self._compute()), asyncio.create_task(self._beat())]

    def submit(self, task: _Task) -> None:
        self._seen = task.seq
        self.waiting.append(task)
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        self._work.set()

    def report(self) -> None:
        now = [self._now] if self._now is not None else []
        self._world.fleet.on_load(
            self.name,
            1,
            load(
                waiting=len(self.waiting),
                running=len(self._running) + len(now),
                queued_prefill_tokens=sum(t.new_tokens for t in [*self.waiting, *now]),
                prefill=self._fit,
                seen={self._world.brain.router_boot: self._seen},
            ),
        )

    async def close(self) -> None:
        tasks = [*self._tasks, *self._running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            self.report()

    async def _compute(self) -> None:
        while True:
            while not self.waiting:
                self._work.clear()
                await self._work.wait()
            await self._slots.acquire()
            task = self._now = self.waiting.popleft()
            await asyncio.sleep(self._slowness * self._fit.predict_ms(0, task.new_tokens) / 1000)
            self._now = None
            self.computed_tokens += task.new_tokens
            task.first.set()
            decode = asyncio.create_task(self._decode(task))
            self._running.add(decode)
            decode.add_done_callback(self._running.discard)

    async def _decode(self, task: _Task) -> None:
        await asyncio.sleep(DECODE_STEP_S * task.answer_tokens)
        self._slots.release()
        task.end.set()


class Fleet:
    """Use as an async context manager."""

    def __init__(
        self,
        replicas: int,
        *,
        per_token_ms: float = 1.0,
        max_running: int = 32,
        slowness: float = 1.0,
        routers: int = 1,
        **settings: object,
    ) -> None:
        self.world = World()
        self.world.clock.__class__ = _LoopClock
        self.replicas: dict[str, Replica] = {}
        self.settings = RouterConfig(**settings)
        self.queues: list[RequestQueue] = []
        self._routers = routers
        self._make = (replicas, per_token_ms, max_running, slowness)

    async def __aenter__(self) -> Fleet:
        count, *rest = self._make
        names = [f"r{number}" for number in range(count)]
        self.replicas = {name: Replica(name, self.world, *rest) for name in names}
        for _ in range(self._routers):
            self.queues.append(RequestQueue(self.world.brain, self.settings, self.world.clock))
        for queue in self.queues:
            queue.share(Told([other for other in self.queues if other is not queue]))
        return self

    @property
    def queue(self) -> RequestQueue:
        """The first router's."""
        return self.queues[0]

    async def __aexit__(self, *_: object) -> None:
        for replica in self.replicas.values():
            await replica.close()

    async def ask(
        self, tenant: Tenant, keys: KeyChain, answer_tokens: int = 50, router: int = 0
    ) -> float:
        """One request from its arrival to its end; seconds until the first token. Raises
        UserError."""
        queue = self.queues[router]
        loop, brain = asyncio.get_running_loop(), self.world.brain
        began_s = loop.time()
        job = job_of(tenant, keys, answer_tokens)
        await queue.wait(tenant, [job], job.expected_tokens(1_024))
        decision = brain.decide(job.query(job.first_leg()))
        assert not isinstance(decision, NoReplica), decision
        queue.placed(job, decision)
        new = decision.prompt_tokens - decision.predicted_cached_tokens
        first, end = asyncio.Event(), asyncio.Event()
        self.replicas[decision.replica].submit(
            _Task(decision.decision_id, decision.dispatch_seq, new, answer_tokens, first, end)
        )
        await first.wait()
        ttft_s = loop.time() - began_s
        brain.first_token(decision.decision_id, 0, decision.prompt_tokens, 1000 * ttft_s)
        for each in self.queues:
            each.pump()
        await end.wait()
        brain.finish(decision.decision_id, Outcome("ok", False, ttft_ms=1000 * ttft_s))
        for each in self.queues:
            each.pump()
        return ttft_s


class Told(Others):
    """Routers that hear of each other at once."""

    def __init__(self, queues: Sequence[RequestQueue]) -> None:
        self._queues = queues

    def worked(self, name: str, tokens: int) -> None:
        for queue in self._queues:
            queue.worked_elsewhere(name, tokens)


class _LoopClock:
    """The loop's time."""

    def __call__(self) -> float:
        return asyncio.get_running_loop().time()


def tenant(name: str, **policy: object) -> Tenant:
    return Tenant(name, "private", name.encode(), "", TenantPolicy(**policy))


def unique(tokens: int) -> KeyChain:
    """A prompt that nobody has seen."""
    return prompt((next(_seeds), tokens // BLOCK_TOKENS))


def job_of(tenant: Tenant, keys: KeyChain, answer_tokens: int, **changes: object) -> Job:
    tokens = len(keys) * BLOCK_TOKENS + 1
    settings: dict = {
        "request_id": "q",
        "tenant": tenant.name,
        "salt": tenant.salt,
        "model": "tiny",
        "pool": POOL,
        "block_tokens": BLOCK_TOKENS,
        "prompt": bytes(4 * tokens),
        "chain": keys,
        "sampling": SamplingParams(max_tokens=answer_tokens, seed=0),
        "first_token_timeout_s": 600.0,
        "timeout_s": 900.0,
        "priority": tenant.policy.priority,
        "ttft_deadline_ms": tenant.policy.ttft_deadline_ms or None,
    }
    return Job(**(settings | changes))


def p95(values: Sequence[float]) -> float:
    """The 95th percentile."""
    return sorted(values)[int(0.95 * (len(values) - 1))]
