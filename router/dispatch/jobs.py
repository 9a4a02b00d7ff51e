"""From token ids to a job: the pool that serves the model, its block keys, the public cut."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from configs.schema import RouterConfig
from events.errors import CoreError, UserError
from events.request import SamplingParams
from kvstore.chaincache import chain_cache
from kvstore.identity import KeyChain, Namespace, chain
from router.dispatch.job import Job
from router.fleet.expected import MAIN
from router.fleet.fleet import Fleet
from router.fleet.pool import Pool
from router.tenancy.deadlines import deadlines_of
from router.tenancy.prefixes import PublicPrefixes
from router.tenancy.tenants import Tenant


class JobMaker:
    """Knows the fleet's pools and the registered prefixes; keeps nothing but runs of block keys."""

    def __init__(
        self,
        fleet: Fleet,
        prefixes: PublicPrefixes,
        cluster_key: bytes,
        model: str,
        config: RouterConfig,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        """`adapters`: content digests by name."""
        self._adapters = adapters or {}
        self._fleet = fleet
        self._prefixes = prefixes
        self._cluster_key = cluster_key
        self._model = model
        self._config = config
        self._known_runs = chain_cache()

    def pool(self, revision: str = MAIN) -> Pool | None:
        """Of the revision's pools the one with most linked replicas: whose limits are told."""
        for pool in self._fleet.pools().values():
            if pool.revision == revision:
                return pool
        return None

    def make(
        self,
        request_id: str,
        tenant: Tenant,
        prompt: bytes,
        sampling: SamplingParams,
        pool: Pool | None,
        pin: str | None = None,
        model: str = "",
    ) -> Job:
        """A job for `prompt` (u32 little endian), to be computed with the adapter that `model`
        names, if it does; with `others` for the other pools of the revision, unless it is pinned.
        Raises UserError (503) where there is no pool."""
        if pool is None:
            raise _nobody()
        job = self._make(request_id, tenant, prompt, sampling, pool, pin, model)
        if pin is not None or len(self._fleet.pools()) == 1:
            return job
        others = [
            self._make(request_id, tenant, prompt, sampling, other, None, model)
            for name, other in self._fleet.pools().items()
            if other.revision == pool.revision and name != pool.name
        ]
        return replace(job, others=tuple(others)) if others else job

    def _make(
        self,
        request_id: str,
        tenant: Tenant,
        prompt: bytes,
        sampling: SamplingParams,
        pool: Pool,
        pin: str | None,
        model: str,
    ) -> Job:
        deadlines = deadlines_of(tenant.policy, self._config)
        adapter = (model, self._adapters[model]) if model in self._adapters else None
        cut = 0
        if pool.public_prefixes:
            cut = self._prefixes.cut_blocks(prompt, pool.block_tokens)
        return Job(
            request_id=request_id,
            tenant=tenant.name,
            salt=tenant.salt,
            model=self._model,
            pool=pool.name,
            block_tokens=pool.block_tokens,
            prompt=prompt,
            chain=self._chain(pool.namespace.adapted(adapter), tenant, prompt, cut),
            sampling=sampling,
            public_cut_blocks=cut,
            first_token_timeout_s=deadlines.first_token_timeout_s,
            timeout_s=self._config.request_timeout_s,
            pin=pin,
            priority=deadlines.priority,
            weight=tenant.policy.weight,
            ttft_deadline_ms=deadlines.ttft_ms,
            itl_deadline_ms=deadlines.itl_ms,
            warm_share=tenant.policy.warm_share,
            adapter=adapter,
        )

    def _chain(
        self, namespace: Namespace, tenant: Tenant, prompt: bytes, cut_blocks: int
    ) -> KeyChain:
        known = self._known_runs
        return chain(self._cluster_key, namespace, tenant.salt, prompt, cut_blocks, known)


def _nobody() -> UserError:
    return UserError(
        CoreError(
            status=503,
            message="no replica of this model is there",
            type="server_error",
            code="no_replica",
            retry_after_s=2.0,
        )
    )
