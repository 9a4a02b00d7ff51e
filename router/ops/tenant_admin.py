"""/router/tenants: who may ask, and how much. Admin key only; keys never come back."""

from __future__ import annotations

from itertools import islice
from typing import Any

import msgspec
from aiohttp import web

from configs.schema import Degradation, TenantPolicy
from router.cluster.shared import TENANT, encode_tenant
from router.openai.fields import Field, Table, array, decimal, integer, one_of, string
from router.ops.admin import json_response, not_found, read_change
from router.services import Services
from router.tenancy.tenants import Tenant, TenantChange

MAX_COUNT = 10**9
_count = integer(0, MAX_COUNT)
_degradation = one_of(*Degradation.__args__)

_POLICY: Table = {
    "requests_per_min": Field("requests_per_min", _count),
    "tokens_per_min": Field("tokens_per_min", _count),
    "max_concurrent": Field("max_concurrent", _count),
    "weight": Field("weight", decimal(0.01, 1_000.0)),
    "priority": Field("priority", integer(-100, 100)),
    "deadline_class": Field("deadline_class", one_of("interactive", "standard", "batch")),
    "ttft_deadline_ms": Field("ttft_deadline_ms", decimal(0.0, 86_400_000.0)),
    "itl_deadline_ms": Field("itl_deadline_ms", decimal(0.0, 86_400_000.0)),
    "warm_share": Field("warm_share", decimal(0.0, 1.0)),
    "degrade": Field(
        "degrade",
        lambda path, value: tuple(array(_degradation, "an array of strings", 4)(path, value)),
    ),
}
_CHANGE: Table = {
    "key": Field("key", string(512)),
    "add_key": Field("add_key", string(512)),
    "remove_key": Field("remove_key", string(512)),
    "scope": Field("scope", string(80)),
    **_POLICY,
}


MAX_REPLICAS = 16
"""For each tenant: those that hold most of it."""


def _shown(tenant: Tenant, keys: int) -> dict[str, Any]:
    return {
        "name": tenant.name,
        "scope": tenant.scope,
        "keys": keys,
        **msgspec.to_builtins(tenant.policy),
    }


class TenantAdmin:
    """Handlers of /router/tenants."""

    def __init__(self, services: Services) -> None:
        self._of = services

    def routes(self) -> list[web.RouteDef]:
        """To be added to the application."""
        return [
            web.get("/router/tenants", self.list),
            web.put("/router/tenants/{name}", self.put),
            web.delete("/router/tenants/{name}", self.remove),
        ]

    async def list(self, request: web.Request) -> web.Response:
        """Names, numbers of keys and policies; first whoever comes without a key."""
        self._of.gate.check_admin(request.headers)
        tenants = self._of.tenants
        listed = [(tenants.anonymous, 0), *tenants.listed()]
        return json_response({"tenants": [self._used(*of) for of in listed]})

    def _used(self, tenant: Tenant, keys: int) -> dict[str, Any]:
        warm = self._of.shares.of(tenant.name)
        most = dict(islice(warm.items(), MAX_REPLICAS))
        return {**_shown(tenant, keys), "warm_blocks": most, "warm_replicas": len(warm)}

    async def put(self, request: web.Request) -> web.Response:
        """Add or change one, on all routers: what is not given stays."""
        asked = await read_change(self._of.gate, request, _CHANGE)
        policy = {name: asked.pop(name) for name in asked.keys() & TenantPolicy.__struct_fields__}
        change = TenantChange(**asked, policy=policy)
        tenants = self._of.tenants
        tenant = tenants.put(request.match_info["name"], change)
        config = encode_tenant(tenants.config(tenant))
        shared = await self._of.registry.share(TENANT, tenant.name, config)
        return json_response({**_shown(tenant, tenants.key_count(tenant.name)), "shared": shared})

    async def remove(self, request: web.Request) -> web.Response:
        """Its keys open nothing any more, on any router."""
        self._of.gate.check_admin(request.headers)
        name = request.match_info["name"]
        if not self._of.tenants.remove(name):
            raise not_found("tenant")
        self._of.admitter.limits.forget(name)
        shared = await self._of.registry.share(TENANT, name, None)
        return json_response({"name": name, "shared": shared})
