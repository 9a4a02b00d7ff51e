"""The whole document, from the same limits that the parser checks."""

from __future__ import annotations

from importlib.metadata import version

from router.openai.schema import Limits
from router.openapi.generating import (
    CHAT_ANSWER,
    COMPLETION_ANSWER,
    USAGE,
    chat_request,
    completion_request,
)
from router.openapi.operations import READER, operations
from router.openapi.parts import (
    ALWAYS,
    Json,
    answer,
    body,
    failures,
    in_path,
    reference,
    text,
)

_STRING_OR_NULL: Json = {"type": ["string", "null"]}
_ERROR: Json = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": text(),
                "type": text(),
                "param": _STRING_OR_NULL,
                "code": _STRING_OR_NULL,
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_EVENT: Json = {"type": "object", "properties": {"data": text()}, "required": ["data"]}
_CLIENT = [{}, {"key": []}]


def _generating(summary: str, request: Json, whole_answer: str) -> Json:
    content = {
        "application/json": {"schema": reference(whole_answer)},
        "text/event-stream": {"schema": _EVENT},
    }
    return {
        "post": {
            "summary": summary,
            "security": _CLIENT,
            "requestBody": body(request),
            "responses": {
                "200": {
                    "description": "One answer, or with `stream` its events",
                    "content": content,
                },
                **failures(401, 404, 429, 503, 504, *ALWAYS),
            },
        }
    }


def _plain(
    summary: str, *errors: int, security: list[Json] | None = None, kind: str = "application/json"
) -> Json:
    return {
        "get": {
            "summary": summary,
            "security": security or [{}],
            "responses": {
                "200": answer(summary, kind, None if kind == "application/json" else text()),
                **failures(*errors, 500),
            },
        }
    }


def _model() -> Json:
    operation = _plain("One model", 401, 404, security=_CLIENT)
    operation["get"]["parameters"] = [in_path("id", text(256, 1))]
    return operation


def document(limits: Limits) -> Json:
    """OpenAPI 3.1; `limits` are those of the deployment that it describes."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "warmroute",
            "version": version("warmroute"),
            "description": "An OpenAI gateway that sends each request where its prompt is warm.",
        },
        "paths": {
            "/v1/chat/completions": _generating(
                "An answer to a conversation", chat_request(limits), "ChatCompletion"
            ),
            "/v1/completions": _generating(
                "An answer to a bare prompt", completion_request(limits), "Completion"
            ),
            "/v1/models": _plain("What can be asked for", 401, security=_CLIENT),
            "/v1/models/{id}": _model(),
            "/health": _plain("The process lives"),
            "/ready": _plain("A request that comes now could be routed", 503),
            "/metrics": _plain("Prometheus", kind="text/plain"),
            "/openapi.json": _plain("This document"),
            "/dashboard": _plain("The live page", 401, security=READER, kind="text/html"),
            **operations(limits),
        },
        "components": {
            "schemas": {
                "Error": _ERROR,
                "Usage": USAGE,
                "ChatCompletion": CHAT_ANSWER,
                "Completion": COMPLETION_ANSWER,
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "admin": {"type": "apiKey", "in": "header", "name": "x-warmroute-admin"},
            },
        },
    }
