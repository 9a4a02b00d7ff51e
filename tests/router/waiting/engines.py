"""Real schedulers in virtual time, under the real queue and the real choice: replicas whose device
only takes time, with their hellos, reports and digests.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import numpy as np

from configs.schema import RouterConfig
from events.request import SamplingParams
from kvstore.identity import KeyChain, Namespace, block_key, chain
from replica.engine.messages import ChildOutput, EngineRequest
from replica.sched.plan import ChildId
from replica.sched.scheduler import Scheduler
from router.choice.choose import RouterBrain
from router.choice.route import NoReplica, Outcome
from router.dispatch.job import Job
from router.fleet.expected import Expected, pool_name
from router.fleet.fleet import Fleet
from router.tenancy.tenants import Tenant
from router.waiting.queue import RequestQueue
from tests.router.kit import KEY
from tests.router.waiting.fleet import job_of
from tools.sim.clock import Agenda
from tools.sim.hello import make_hello, make_limits
from tools.sim.profiles import DEVICES
from tools.sim.replica import SimReplica
from tools.sim.settings import Settings
from tools.sim.wire import RELIABLE, Wire

BLOCK_TOKENS = 64


class LoopAgenda(Agenda):
    """The running loop's time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    @property
    def now_s(self) -> float:  # type: ignore[override]
        return self._loop.time()

    def __call__(self) -> float:
        return self._loop.time()

    def at(self, at_s: float, act: Callable[[], None]) -> Callable[[], None]:
        return self._loop.call_at(max(at_s, self._loop.time()), act).cancel


class _Open:
    """A request that a replica has."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[int] = loop.create_future()
        self.end: asyncio.Future[None] = loop.create_future()


class Engines:
    """Made within a running loop; `close` it. `waits_s`: what each tenant's requests waited in the
    router."""

    def __init__(self, replicas: int, device: str, **settings: object) -> None:
        agenda = LoopAgenda()
        said = Settings(policy="warmroute", replicas=replicas, device=DEVICES[device])
        hello = make_hello(BLOCK_TOKENS, said)
        self.pool = pool_name(hello)
        self._namespace = Namespace.of_hello(hello)
        self._seeds = itertools.count(1)
        self._children = itertools.count(1)
        self._open: dict[ChildId, _Open] = {}
        config = RouterConfig(**settings)
        self.fleet = Fleet(Expected.like(hello), agenda)
        self.brain = RouterBrain(self.fleet, config, agenda, random.Random(1))
        self.queue = RequestQueue(self.brain, config, agenda)
        self.replicas: dict[str, SimReplica] = {}
        self.waits_s: defaultdict[str, list[float]] = defaultdict(list)
        self._wires = []
        for name in said.names:
            scheduler = Scheduler(make_limits(hello, said), partial(block_key, KEY))
            replica = SimReplica(name, 1, said.device, scheduler, hello.digest, agenda)
            replica.on_output = self._on_output
            self.replicas[name] = replica
            wire = Wire(replica, hello, self.fleet, agenda, RELIABLE, random.Random(2))
            wire.join()
            self._wires.append(wire)

    def close(self) -> None:
        """No more beats."""
        for wire in self._wires:
            wire.retire()

    def unique(self, tokens: int) -> np.ndarray:
        """uint32 (tokens,): a prompt that nobody has seen."""
        return np.full(tokens, next(self._seeds), np.uint32)

    async def ask(self, tenant: Tenant, prompt: np.ndarray, answer_tokens: int = 50) -> float:
        """One request from its arrival to its end; seconds until the first token. Raises
        UserError."""
        began_s = asyncio.get_running_loop().time()
        keys = chain(KEY, self._namespace, tenant.salt, prompt.tobytes())
        job = self._job(tenant, keys, prompt, answer_tokens)
        waited_s = await self.queue.wait(tenant, [job], job.expected_tokens(1_024))
        self.waits_s[tenant.name].append(waited_s)
        decision = self.brain.decide(job.query(job.first_leg()))
        assert not isinstance(decision, NoReplica), decision
        self.queue.placed(job, decision)
        child, entry = ChildId(next(self._children)), _Open()
        self._open[child] = entry
        self.replicas[decision.replica].submit(
            EngineRequest(
                child=child,
                prompt=tuple(prompt.tolist()),
                chain=keys,
                params=job.sampling,
                seed=0,
                eos_ids=frozenset(),
                tenant=tenant.name,
                arrival_s=asyncio.get_running_loop().time(),
                weight=tenant.policy.weight,
                router_boot=self.brain.router_boot,
                dispatch_seq=decision.dispatch_seq,
            )
        )
        cached = await entry.first
        ttft_s = asyncio.get_running_loop().time() - began_s
        self.brain.first_token(decision.decision_id, cached, len(prompt), 1e3 * ttft_s)
        self.queue.pump()
        await entry.end
        outcome = Outcome("ok", False, cached, len(prompt), answer_tokens, 1e3 * ttft_s)
        self.brain.finish(decision.decision_id, outcome)
        self.queue.pump()
        return ttft_s

    def _job(self, tenant: Tenant, keys: KeyChain, prompt: np.ndarray, answer_tokens: int) -> Job:
        return job_of(
            tenant,
            keys,
            answer_tokens,
            pool=self.pool,
            block_tokens=BLOCK_TOKENS,
            prompt=prompt.tobytes(),
            sampling=SamplingParams(
                max_tokens=answer_tokens, seed=0, temperature=0.0, ignore_eos=True
            ),
        )

    def _on_output(self, replica: SimReplica, output: ChildOutput) -> None:
        entry = self._open[output.child]
        if output.token_ids and not entry.first.done():
            entry.first.set_result(output.cached_tokens)
        if output.finish is not None:
            assert output.error is None
            del self._open[output.child]
            entry.end.set_result(None)
