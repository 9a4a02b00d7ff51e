"""Whether some finite document satisfies a JSON schema.

A schema that requires itself inside itself compiles, and is obeyed token by token for ever. Here
each schema object is asked whether it can end, to a fixpoint over its references. Keywords that
this doesn't know can only forbid more; what they make impossible the library finds by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any] | bool
MAX_ROUNDS = 64
MAX_VISITS = 20_000
"""Beyond them (about a tenth of a second) the schema gets the benefit of the doubt."""

_MAX_INDEX_DIGITS = 9


def can_end(root: Schema) -> bool:
    """False for a schema whose every document would be endless."""
    # What is inside comes first, so that only chains of references need more than one round; each
    # round goes the other way, since chains are written from either end.
    rest = list(_objects(root))[::-1]
    finite: set[int] = set()
    for _ in range(min(MAX_ROUNDS, max(2, MAX_VISITS // (len(rest) + 1)))):
        left = []
        for node in rest:
            if _ends(node, root, finite):
                finite.add(id(node))
            else:
                left.append(node)
        if len(left) == len(rest):
            return not isinstance(root, dict) or id(root) in finite
        rest = left[::-1]
    return True


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for child in value:
            yield from _objects(child)


def _ends(node: dict[str, Any], root: Schema, finite: set[int]) -> bool:
    """Whether it can end, if those in `finite` can."""

    def known(part: Any) -> bool:
        return not isinstance(part, dict) or id(part) in finite

    for name in ("anyOf", "oneOf"):
        choices = node.get(name)
        if isinstance(choices, list) and choices and not any(map(known, choices)):
            return False
    parts = node.get("allOf")
    if isinstance(parts, list) and not all(map(known, parts)):
        return False
    if "$ref" in node and not known(_pointed(root, node["$ref"])):
        return False
    return "enum" in node or "const" in node or _plain_end(node, known)


def _plain_end(node: dict[str, Any], known: Callable[[Any], bool]) -> bool:
    """Its own objects and arrays; a type beside them is a way out."""
    kinds = node.get("type", ["object", "array", "string"])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if any(kind not in ("object", "array") for kind in kinds):
        return True
    properties = node.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    required = node.get("required")
    required = required if isinstance(required, list) else []
    needed = [properties[name] for name in required if isinstance(name, str) and name in properties]
    if "object" in kinds and all(map(known, needed)):
        return True
    least = node.get("minItems", 0)
    first = node.get("prefixItems")
    inside = [*(first if isinstance(first, list) else ()), node.get("items", True)]
    full = isinstance(least, int) and least > 0
    return "array" in kinds and (not full or all(map(known, inside[:least])))


def _pointed(root: Schema, pointer: Any) -> Any:
    """What a reference into the same document means; True for any other, which the library
    refuses."""
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        return True
    at: Any = root
    for part in pointer[1:].split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(at, dict) and name in at:
            at = at[name]
        elif isinstance(at, list) and _is_index(name) and int(name) < len(at):
            at = at[int(name)]
        else:
            return True
    return at


def _is_index(name: str) -> bool:
    return len(name) <= _MAX_INDEX_DIGITS and name.isdecimal()
