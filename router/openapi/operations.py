"""/router/*: what the router knows, and the routes that change it."""

from __future__ import annotations

from typing import get_args

from msgspec.structs import replace

from configs.schema import Degradation
from router.openai.schema import Limits
from router.openapi.generating import chat_request
from router.openapi.parts import (
    ALWAYS,
    NULL,
    Json,
    answer,
    body,
    failures,
    in_path,
    in_query,
    items,
    number,
    one_of,
    optional,
    record,
    text,
    whole,
)
from router.policies import POLICIES

ADMIN = [{"admin": []}, {"key": []}]
READER = [{}, *ADMIN]
_COUNT = whole(0, 10**9)
_NAME = text(64, 1)


def read(summary: str, *parameters: Json, missing: bool = False) -> Json:
    """GET for whoever may look."""
    errors = failures(*((400,) if parameters else ()), 401, 403, *((404,) if missing else ()), 500)
    return {
        "get": {
            "summary": summary,
            "security": READER,
            "parameters": list(parameters),
            "responses": {"200": answer(summary), **errors},
        }
    }


def change(
    method: str, summary: str, schema: Json | None = None, *parameters: Json, required: bool = True
) -> Json:
    """A route that changes something: admin key only."""
    operation: Json = {
        "summary": summary,
        "security": ADMIN,
        "parameters": list(parameters),
        "responses": {
            "200": answer(summary),
            **failures(401, 403, 404, 409, 429, 503, 504, *ALWAYS),
        },
    }
    if schema is not None:
        operation["requestBody"] = body(schema, required)
    return {method: operation}


def _prompt(limits: Limits) -> Json:
    """Past tool calls are taken whatever the model is shown of them."""
    taken = replace(limits, tool_calls=True)
    return {"messages": chat_request(taken)["properties"]["messages"], "prompt": text(None, 1)}


def _tenant() -> Json:
    fields = {
        "key": text(512, 8),
        "add_key": text(512, 8),
        "remove_key": text(512),
        "scope": text(80, pattern="^(private|group:[A-Za-z0-9_-]{1,64})$"),
        "requests_per_min": _COUNT,
        "tokens_per_min": _COUNT,
        "max_concurrent": _COUNT,
        "weight": number(0.01, 1_000),
        "priority": whole(-100, 100),
        "deadline_class": one_of("interactive", "standard", "batch"),
        "ttft_deadline_ms": number(0, 86_400_000),
        "itl_deadline_ms": number(0, 86_400_000),
        "warm_share": number(0, 1),
        "degrade": items(one_of(*get_args(Degradation)), 4),
    }
    return record(optional(fields))


def operations(limits: Limits) -> Json:
    """Paths and what can be done there."""
    policy = one_of(*sorted(POLICIES))
    prompt = _prompt(limits)
    name = in_path("name", text(64, 1, pattern="^[A-Za-z0-9_-]{1,64}$"))
    return {
        "/router/replicas": read("The replicas, as the router knows them"),
        "/router/peers": read("The other routers, and what they have under way"),
        "/router/trust": read("Predicted against actual, by replica and tenant"),
        "/router/hot": read("The hottest heads of prompts, and what was brought to more replicas"),
        "/router/scale": read("Whether the fleet is large enough, and each part of it"),
        "/router/revisions": {
            **read("The revisions of the model: shares, replicas, and how they do"),
            **change("put", "Another share for a revision; ends a revert", _share()),
        },
        "/router/alarms": read("Active alarms, and how often each was raised"),
        "/router/decisions": read("The newest decisions", in_query("limit", whole(1, 1_000))),
        "/router/decisions/{id}": read(
            "One decision with all its terms and its outcome", in_path("id", _NAME), missing=True
        ),
        "/router/policy": {
            **read("The routing policy in force, and what else there is"),
            **change("put", "Another policy from the next request on", _one("policy", policy)),
        },
        "/router/shadow": {
            **read("How a second policy would have chosen"),
            **change(
                "put",
                "A second policy scores live traffic and routes nothing; null ends it",
                _one("policy", {"anyOf": [policy, NULL]}),
            ),
        },
        "/router/tenants": _admin_read("Tenants, their policies and numbers of keys"),
        "/router/tenants/{name}": {
            **change(
                "put",
                "Add or change a tenant: what is not given stays",
                _tenant(),
                name,
                required=False,
            ),
            **change("delete", "Remove a tenant", None, name),
        },
        "/router/public-prefixes": {
            **_admin_read("Heads that all tenants share: names and lengths"),
            **change("post", "Register a head that all tenants share", _either(prompt)),
        },
        "/router/public-prefixes/{name}": change(
            "delete", "Nobody shares this head any more", None, in_path("name", _NAME)
        ),
        "/router/cache/clear": change(
            "post",
            "Empty every replica's cache",
            record(optional({"limit_blocks": whole(1)})),
            required=False,
        ),
        "/router/warm": change(
            "post",
            "Make a prompt warm for a tenant on some replicas, and probe it",
            _either(
                prompt,
                {
                    "tenant": _NAME,
                    "replicas": whole(1, 4_096),
                    "model": one_of(*sorted(limits.models)),
                },
            ),
        ),
        "/router/explain": change(
            "post", "Where a request would go now, and why; nothing is sent", _explained(limits)
        ),
    }


def _share() -> Json:
    shares = optional({"weight": number(0, 1), "mirror": number(0, 1)})
    return record({"revision": text(64, 1), **shares}, ("revision",))


def _one(name: str, schema: Json) -> Json:
    return record({name: schema}, (name,))


def _either(prompt: Json, more: Json | None = None) -> Json:
    """A conversation or a bare prompt."""
    also = optional(more or {})
    return {"anyOf": [record({name: prompt[name], **also}, (name,)) for name in prompt]}


def _admin_read(summary: str) -> Json:
    operation = read(summary)
    operation["get"]["security"] = ADMIN
    return operation


def _explained(limits: Limits) -> Json:
    """The body of a chat request, its model optional, and whose it would be."""
    schema = chat_request(limits)
    properties = schema["properties"] | optional({"tenant": _NAME})
    return schema | {"properties": properties, "required": ["messages"]}
