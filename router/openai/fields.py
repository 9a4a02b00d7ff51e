"""Readers of single JSON values, and the walk over an object by a table of them.

A reader takes (path, value) and gives the typed value or raises UserError. Tables say which
parameter fills which attribute; the walk follows the client's own order, as OpenAI's checks do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from events.errors import UserError
from router.openai import faults

Reader = Callable[[str, Any], Any]

MAX_INTEGER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Field:
    """One parameter. `attribute` None: checked, then without effect. Null counts as absent unless
    the parameter is required."""

    attribute: str | None
    read: Reader
    required: bool = False


Table = Mapping[str, Field | Callable[[str], UserError]]
"""Name to field, or to the refusal of a parameter that we know and do not support."""


def _required(table: Table) -> tuple[str, ...]:
    if isinstance(table, WideTable):
        return table.required
    return tuple(
        name for name, entry in table.items() if isinstance(entry, Field) and entry.required
    )


class WideTable(dict[str, Field | Callable[[str], UserError]]):
    """A table of many names, of which only few are required: those are known beforehand."""

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self.required = _required(table)


def walk(body: Mapping[str, Any], table: Table, path: str = "") -> dict[str, Any]:
    """Attribute to value, for what `body` gives. Raises UserError at the first mistake."""
    values: dict[str, Any] = {}
    for name, value in body.items():
        entry = table.get(name)
        if entry is None:
            raise faults.unknown(path, name)
        where = f"{path}.{name}" if path else name
        if not isinstance(entry, Field):
            if value is not None:
                raise entry(where)
        elif value is not None or entry.required:
            read = entry.read(where, value)
            if entry.attribute is not None:
                values[entry.attribute] = read
    for name in _required(table):
        if name not in body:
            raise faults.missing(f"{path}.{name}" if path else name)
    return values


def boolean(path: str, value: Any) -> bool:
    """true or false, nothing that looks like it."""
    if not isinstance(value, bool):
        raise faults.invalid_type(path, "a boolean", value)
    return value


def integer(minimum: int, maximum: int = MAX_INTEGER) -> Reader:
    """A reader of whole numbers; 3.0 is one, as in JSON Schema."""

    def read(path: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise faults.invalid_type(path, "an integer", value)
        if value < minimum:
            raise faults.below_min(path, "integer", minimum, value)
        if value > maximum:
            raise faults.above_max(path, "integer", maximum, value)
        return value

    return read


def decimal(minimum: float, maximum: float) -> Reader:
    """A reader of numbers within closed bounds."""

    def read(path: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise faults.invalid_type(path, "a decimal", value)
        if value < minimum:
            raise faults.below_min(path, "decimal", minimum, value)
        if value > maximum:
            raise faults.above_max(path, "decimal", maximum, value)
        return float(value)

    return read


def string(maximum: int | None = None, minimum: int = 0) -> Reader:
    """A reader of strings of bounded length in characters."""

    def read(path: str, value: Any) -> str:
        if not isinstance(value, str):
            raise faults.invalid_type(path, "a string", value)
        if len(value) < minimum:
            raise faults.empty_string(path)
        if maximum is not None and len(value) > maximum:
            raise faults.long_string(path, maximum, len(value))
        return value

    return read


def one_of(*allowed: str) -> Reader:
    """A reader of an enumeration."""
    check = string()

    def read(path: str, value: Any) -> str:
        text: str = check(path, value)
        if text not in allowed:
            raise faults.not_one_of(path, allowed)
        return text

    return read


def array(element: Reader, expected: str, maximum: int, minimum: int = 0) -> Reader:
    """A reader of arrays; `expected` is for the error: "an array of strings"."""

    def read(path: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise faults.invalid_type(path, expected, value)
        if len(value) < minimum:
            raise faults.empty_array(path)
        if len(value) > maximum:
            raise faults.long_array(path, maximum, len(value))
        return [element(f"{path}[{index}]", entry) for index, entry in enumerate(value)]

    return read


def mapping(path: str, value: Any) -> dict[str, Any]:
    """Any JSON object."""
    if not isinstance(value, dict):
        raise faults.invalid_type(path, "an object", value)
    return value


def nested(table: Table) -> Reader:
    """A reader of objects with known names; gives a dict of attributes."""

    def read(path: str, value: Any) -> dict[str, Any]:
        return walk(mapping(path, value), table, path)

    return read


def only(accepted: Any, why: str) -> Reader:
    """A reader for a parameter of which one value is supported; it means what we do anyway."""

    def read(path: str, value: Any) -> Any:
        if value != accepted or type(value) is not type(accepted):
            raise faults.unsupported_value(path, why)
        return value

    return read
