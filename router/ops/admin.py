"""/router/*: what the router knows and decided, and the routes that change it (admin key)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from aiohttp import web

from configs.model.errors import TemplateError
from events.errors import CoreError, UserError
from events.wire import plain
from router.choice.decisions import DecisionRecord
from router.cluster.shared import ONLY, POLICY, PREFIX, SHADOW
from router.dispatch.link import ReplicaLink
from router.errors import AttemptError
from router.openai import faults
from router.openai.body import load_object
from router.openai.fields import Field, Table, integer, string, walk
from router.openai.messages import messages
from router.ops.explain import Explainer
from router.ops.warm import Warmer
from router.policies import POLICIES
from router.rendering.textcache import pack
from router.services import Services
from router.serving.http import read_body
from router.tenancy.gate import Gate
from router.tenancy.tenants import ANONYMOUS, Tenant

MAX_LISTED = 1_000
MAX_MESSAGES = 2_048
CLEAR_TIMEOUT_S = 30.0


def _name_or_null(path: str, value: Any) -> str | None:
    return None if value is None else string(64)(path, value)


_POLICY: Table = {"policy": Field("policy", string(64), required=True)}
_SHADOW: Table = {"policy": Field("policy", _name_or_null, required=True)}
_PROMPT: Table = {
    "messages": Field("messages", messages(MAX_MESSAGES, True)),
    "prompt": Field("prompt", string(minimum=1)),
}
MAX_MODEL_CHARS = 128
_TENANT_NAME: Table = {"tenant": Field("tenant", string(64))}
_WARM: Table = {
    **_PROMPT,
    **_TENANT_NAME,
    "replicas": Field("replicas", integer(1, 4_096)),
    "model": Field("model", string(MAX_MODEL_CHARS)),
}
_CLEAR: Table = {"limit_blocks": Field("limit_blocks", integer(1))}


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode(value, enc_hook=plain),
        content_type="application/json",
    )


async def read_change(gate: Gate, request: web.Request, table: Table) -> dict[str, Any]:
    """The body of a route that changes something: key first, then the content."""
    gate.check_admin(request.headers)
    body = await read_body(request)
    return walk(load_object(body), table) if body else walk({}, table)


def not_found(what: str) -> UserError:
    return UserError(CoreError(status=404, message=f"There is no such {what}.", code="not_found"))


def _record(record: DecisionRecord) -> dict[str, Any]:
    return {"decision": record.decision, "outcome": record.outcome}


def _limit(text: str) -> int:
    """How many to list. Raises UserError (400)."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text
    return integer(1, MAX_LISTED)("limit", number)


class Admin:
    """Handlers of /router/*."""

    def __init__(self, services: Services) -> None:
        self._of = services
        self._warmer = Warmer(services)
        self._explainer = Explainer(services)

    def routes(self) -> list[web.RouteDef]:
        """To be added to the application."""
        return [
            web.get("/router/replicas", self.replicas),
            web.get("/router/peers", self.peers),
            web.get("/router/trust", self.trust),
            web.get("/router/alarms", self.alarms),
            web.get("/router/decisions", self.decisions),
            web.get("/router/decisions/{id}", self.decision),
            web.get("/router/policy", self.policy),
            web.put("/router/policy", self.set_policy),
            web.get("/router/shadow", self.shadow),
            web.put("/router/shadow", self.set_shadow),
            web.get("/router/public-prefixes", self.prefixes),
            web.post("/router/public-prefixes", self.add_prefix),
            web.delete("/router/public-prefixes/{name}", self.remove_prefix),
            web.post("/router/cache/clear", self.clear_caches),
            web.post("/router/warm", self.warm),
            web.post("/router/explain", self.explain),
        ]

    async def replicas(self, request: web.Request) -> web.Response:
        """Everybody whom the fleet knows, with the state of the link."""
        self._of.gate.check_reader(request.headers)
        views = []
        for view in self._of.fleet.replicas():
            link = self._of.links.get(view.replica) or self._of.backends.seats.get(view.replica)
            views.append(
                {
                    **msgspec.to_builtins(view),
                    "link": link.state if link else "none",
                    "in_flight": link.in_flight if link else 0,
                }
            )
        return json_response({"replicas": views})

    async def peers(self, request: web.Request) -> web.Response:
        """This router, and the others that it hears."""
        self._of.gate.check_reader(request.headers)
        views = self._of.brain.peers.views(time.monotonic())
        return json_response({"router": self._of.config.router.id, "peers": views})

    async def trust(self, request: web.Request) -> web.Response:
        """What was predicted of answered requests and what came true, by replica and tenant."""
        self._of.gate.check_reader(request.headers)
        accuracy = self._of.brain.accuracy
        views = [
            {
                "replica": view.replica,
                "trust": view.trust,
                "ttft_ratio": view.ttft_ratio,
                "locality": view.locality,
                "false_positive_rate": view.false_positive_rate,
                "tenants": accuracy.by_tenant(view.replica),
            }
            for view in self._of.fleet.replicas()
        ]
        ratio = accuracy.total.wrong_depth_ratio
        return json_response(
            {"replicas": views, "total": accuracy.total, "wrong_depth_ratio": ratio}
        )

    async def alarms(self, request: web.Request) -> web.Response:
        """Active alarms, and how often each was raised."""
        self._of.gate.check_reader(request.headers)
        alarms = self._of.fleet.alarms
        now_s = time.monotonic()
        active = [
            {
                "name": alarm.name,
                "replica": alarm.replica,
                "age_s": round(now_s - alarm.since_s, 3),
                "count": alarm.count,
                "detail": alarm.detail,
            }
            for alarm in alarms
        ]
        return json_response({"alarms": active, "raised_total": dict(alarms.raised_total)})

    async def decisions(self, request: web.Request) -> web.Response:
        """The newest decisions, newest first; ?limit=."""
        self._of.gate.check_reader(request.headers)
        limit = _limit(request.query.get("limit", "50"))
        records = self._of.brain.decisions.latest(limit)
        return json_response({"decisions": [_record(record) for record in records]})

    async def decision(self, request: web.Request) -> web.Response:
        """One decision with all its terms, and its outcome once there is one."""
        self._of.gate.check_reader(request.headers)
        record = self._of.brain.decisions.get(request.match_info["id"])
        if record is None:
            raise not_found("decision (only the newest are kept)")
        attempts = self._of.brain.decisions.attempts(record.decision.request_id)
        return json_response({**_record(record), "attempts": attempts})

    async def policy(self, request: web.Request) -> web.Response:
        """The policy in force, and what else there is."""
        self._of.gate.check_reader(request.headers)
        return json_response({"policy": self._of.brain.policy, "known": sorted(POLICIES)})

    async def set_policy(self, request: web.Request) -> web.Response:
        """{"policy": name}: from the next request on."""
        name = (await read_change(self._of.gate, request, _POLICY))["policy"]
        if name not in POLICIES:
            raise faults.not_one_of("policy", tuple(sorted(POLICIES)))
        self._of.brain.set_policy(name)
        shared = await self._of.registry.share(POLICY, ONLY, name.encode())
        return json_response({"policy": name, "shared": shared})

    async def shadow(self, request: web.Request) -> web.Response:
        """How the policy in the shadow would have chosen, beside what was chosen."""
        self._of.gate.check_reader(request.headers)
        return self._shadow_report()

    async def set_shadow(self, request: web.Request) -> web.Response:
        """{"policy": name or null}: compare from the next request on, from zero."""
        name = (await read_change(self._of.gate, request, _SHADOW))["policy"]
        if name is not None and name not in POLICIES:
            raise faults.not_one_of("policy", tuple(sorted(POLICIES)))
        self._of.brain.shadow.set_policy(name or "")
        await self._of.registry.share(SHADOW, ONLY, (name or "").encode())
        return self._shadow_report()

    def _shadow_report(self) -> web.Response:
        brain = self._of.brain
        return json_response({"policy": brain.policy, **brain.shadow.report()})

    async def prefixes(self, request: web.Request) -> web.Response:
        """Names and lengths, never texts."""
        self._of.gate.check_admin(request.headers)
        listed = [
            {"name": prefix.name, "version": prefix.version, "tokens": prefix.length_tokens}
            for prefix in self._of.prefixes
        ]
        return json_response({"version": self._of.prefixes.version, "prefixes": listed})

    async def add_prefix(self, request: web.Request) -> web.Response:
        """{"messages": [...]} or {"prompt": "..."}: a head that all tenants share."""
        asked = await read_change(self._of.gate, request, _PROMPT)
        prefix = self._of.prefixes.add(await self._head(asked))
        shared = await self._of.registry.share(PREFIX, prefix.name, prefix.tokens)
        return json_response(
            {
                "name": prefix.name,
                "version": prefix.version,
                "tokens": prefix.length_tokens,
                "shared": shared,
            }
        )

    async def remove_prefix(self, request: web.Request) -> web.Response:
        """Nobody shares it from the next request on, on any router."""
        self._of.gate.check_admin(request.headers)
        name = request.match_info["name"]
        if not self._of.prefixes.remove(name):
            raise not_found("public prefix")
        shared = await self._of.registry.share(PREFIX, name, None)
        return json_response({"name": name, "shared": shared})

    async def clear_caches(self, request: web.Request) -> web.Response:
        """Empty every linked replica's cache; answers when all of them have."""
        limit_blocks = (await read_change(self._of.gate, request, _CLEAR)).get("limit_blocks")
        links = self._of.links.up()
        cleared = await asyncio.gather(*(self._clear(link, limit_blocks) for link in links))
        return json_response({"replicas": cleared})

    async def warm(self, request: web.Request) -> web.Response:
        """{"tenant", "messages" or "prompt", "replicas": k}, and "model" for an adapter."""
        asked = await read_change(self._of.gate, request, _WARM)
        tenant = self._tenant(asked)
        if "messages" in asked:
            rendered = await self._of.renderer.chat(asked["messages"], tenant=tenant.name)
        elif "prompt" in asked:
            rendered = await self._of.renderer.prompt(asked["prompt"], tenant=tenant.name)
        else:
            raise faults.missing("messages")
        model = asked.get("model", self._of.config.model.name)
        if model not in self._of.widest.models:
            raise faults.model_not_found(model)
        replicas = asked.get("replicas", 1)
        probes = await self._warmer.warm(tenant, rendered.ids, replicas, model)
        return json_response({"tenant": tenant.name, "replicas": probes})

    async def explain(self, request: web.Request) -> web.Response:
        """The body of a generating route, its model optional, and "tenant": nothing is sent."""
        self._of.gate.check_admin(request.headers)
        document = load_object(await read_body(request))
        names = document.keys() & _TENANT_NAME.keys()
        tenant = self._tenant(walk({name: document.pop(name) for name in names}, _TENANT_NAME))
        return json_response(await self._explainer.explain(tenant, document))

    def _tenant(self, asked: dict[str, Any]) -> Tenant:
        tenant = self._of.tenants.named(asked.get("tenant", ANONYMOUS))
        if tenant is None:
            raise not_found("tenant")
        return tenant

    async def _head(self, asked: dict[str, Any]) -> bytes:
        """Ids of a prompt's head: without what a template adds to ask for an answer."""
        if "prompt" in asked:
            return (await self._of.renderer.prompt(asked["prompt"], tenant="")).ids
        if "messages" not in asked:
            raise faults.missing("messages")
        card = self._of.card

        def tokenise() -> bytes:
            segments = card.template.render(asked["messages"], add_generation_prompt=False)
            return pack(card.tokenizer.encode_segments(segments))

        try:
            return await asyncio.to_thread(tokenise)
        except TemplateError:
            message = "the model's chat template refuses these messages"
            raise faults.refusal(message, param="messages", code="invalid_value") from None

    async def _clear(self, link: ReplicaLink, limit_blocks: int | None) -> dict[str, Any]:
        try:
            blocks = await link.clear_cache(CLEAR_TIMEOUT_S, limit_blocks)
        except (AttemptError, TimeoutError):
            message = f"replica {link.target.replica} did not answer"
            error = CoreError(status=503, message=message, type="server_error", code="no_answer")
            raise UserError(error) from None
        self._of.brain.cache_cleared(link.target.replica)
        return {"replica": link.target.replica, "blocks": blocks}
