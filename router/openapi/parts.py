"""What the descriptions of all routes are made of. Plain functions that give pieces of JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]

NULL: Json = {"type": "null"}
BOOLEAN: Json = {"type": "boolean"}
ANYTHING: Json = {"type": "object"}
ERRORS = {
    400: "The request is wrong; the error names the parameter.",
    401: "The key is missing or wrong.",
    403: "This router has no admin key: its changing routes are closed.",
    404: "There is no such thing.",
    408: "The body came too slowly, or the answer was not read in time.",
    409: "Somebody else has changed it meanwhile.",
    413: "The body or the request is too large.",
    415: "The body is compressed.",
    429: "A limit is reached or a queue is full; Retry-After says when to ask again.",
    500: "An unexpected error.",
    503: "Nobody can answer now; Retry-After says when to ask again.",
    504: "The request took longer than allowed.",
}
ALWAYS = (400, 408, 413, 415, 500)
"""What any route with a body may answer."""


def text(maximum: int | None = None, minimum: int = 0, **more: Any) -> Json:
    """A string of bounded length in characters."""
    schema: Json = {"type": "string", **more}
    if maximum is not None:
        schema["maxLength"] = maximum
    if minimum:
        schema["minLength"] = minimum
    return schema


def whole(minimum: int, maximum: int = 2**31 - 1) -> Json:
    """An integer within closed bounds."""
    return {"type": "integer", "minimum": minimum, "maximum": maximum}


def number(minimum: float, maximum: float) -> Json:
    """A number within closed bounds."""
    return {"type": "number", "minimum": minimum, "maximum": maximum}


def one_of(*values: Any) -> Json:
    """An enumeration."""
    return {"enum": list(values)}


def items(of: Json, maximum: int, minimum: int = 0) -> Json:
    """An array of bounded length."""
    return {"type": "array", "items": of, "minItems": minimum, "maxItems": maximum}


def record(properties: Json, required: Iterable[str] = (), **more: Any) -> Json:
    """An object with these names and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        **more,
    }


def optional(properties: Json) -> Json:
    """The same properties, each of which may also be null: that counts as absent."""
    return {name: {"anyOf": [schema, NULL]} for name, schema in properties.items()}


def reference(name: str) -> Json:
    """One of the document's shared schemas."""
    return {"$ref": f"#/components/schemas/{name}"}


def body(schema: Json, required: bool = True) -> Json:
    """A JSON request body."""
    return {"required": required, "content": {"application/json": {"schema": schema}}}


def answer(description: str, kind: str = "application/json", schema: Json | None = None) -> Json:
    """One successful answer."""
    return {"description": description, "content": {kind: {"schema": schema or ANYTHING}}}


def failures(*statuses: int) -> Json:
    """The errors that a route may answer, all in OpenAI's shape."""
    content = {"application/json": {"schema": reference("Error")}}
    return {str(status): {"description": ERRORS[status], "content": content} for status in statuses}


def in_path(name: str, schema: Json) -> Json:
    """A parameter of the path."""
    return {"name": name, "in": "path", "required": True, "schema": schema}


def in_query(name: str, schema: Json) -> Json:
    """An optional parameter of the query."""
    return {"name": name, "in": "query", "required": False, "schema": schema}
