"""Making a prompt warm on chosen replicas for a tenant, and proving it by a probe."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import mmh3
from msgspec.structs import replace

from events.errors import CoreError, UserError
from events.load import OWN_ENGINE, PREFILL, ReplicaHello
from router.dispatch.job import Job
from router.replication.compute import ONE_TOKEN, compute
from router.services import Services
from router.tenancy.tenants import Tenant


@dataclass(frozen=True, slots=True)
class Probe:
    """What a request that follows finds on one replica."""

    replica: str
    prompt_tokens: int
    cached_tokens: int


def _refusal(message: str, param: str) -> UserError:
    return UserError(CoreError(status=400, message=message, param=param, code="invalid_value"))


def rank(replicas: list[str], key: bytes) -> list[str]:
    """The order in which replicas are taken for a prompt: the same for the same prompt."""
    return sorted(replicas, key=lambda name: mmh3.hash64(name.encode() + key)[0])


def serves(hello: ReplicaHello, adapter: tuple[str, str] | None) -> bool:
    """Whether the replica that said so can compute with an adapter."""
    return adapter is None or adapter in [(note.name, note.digest) for note in hello.adapters]


class Warmer:
    """Runs one-token requests pinned to replicas, as the tenant."""

    def __init__(self, services: Services) -> None:
        self._of = services

    async def warm(self, tenant: Tenant, prompt: bytes, replicas: int, model: str) -> list[Probe]:
        """Warm on `replicas` linked replicas of our own that serve `model`, then probe each. Raises
        UserError.

        Those that compute for others answer nobody: they are taken last."""
        pool = self._of.jobs.pool()
        job = self._of.jobs.make("warm", tenant, prompt, ONE_TOKEN, pool, model=model)
        jobs = {one.pool: one for one in (job, *job.others)}
        linked = {
            view.replica: view
            for view in self._of.fleet.replicas()
            if view.linked
            and view.pool in jobs
            and view.state != "draining"
            and view.hello.engine == OWN_ENGINE
            and serves(view.hello, job.adapter)
        }
        if not 1 <= replicas <= len(linked):
            raise _refusal(f"between 1 and {len(linked)} replicas can be warmed", "replicas")
        ranked = rank(list(linked), job.chain.data[-16:])
        chosen = sorted(ranked, key=lambda name: linked[name].hello.role == PREFILL)[:replicas]
        pinned = [replace(jobs[linked[name].pool], pin=name, others=()) for name in chosen]
        return list(await asyncio.gather(*map(self._warm_one, pinned)))

    async def _warm_one(self, job: Job) -> Probe:
        """The first run warms, the second one is the probe."""
        await self._run(job)
        return await self._run(job)

    async def _run(self, job: Job) -> Probe:
        gate = self._of.gate
        with gate.admitted([job], gate.expected_tokens([job])):
            usage = await compute(job, self._of.dispatcher, self._of.budget)
        return Probe(job.pin or "", usage.prompt_tokens, usage.cached_tokens)
