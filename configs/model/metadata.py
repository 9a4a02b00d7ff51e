"""Typed reads from the key-value metadata of a model file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from configs.model.errors import ModelError

T = TypeVar("T")
_REQUIRED: Any = object()


class Metadata:
    """Metadata whose reads name the key and the type that was expected."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def _read(self, key: str, kind: type[T], default: T) -> T:
        value = self._values.get(key, default)
        if value is _REQUIRED:
            raise ModelError(f"'{key}' is missing")
        if kind is float and type(value) is int:
            try:
                value = float(value)
            except OverflowError:
                raise ModelError(f"'{key}' is a number of {value.bit_length()} bits") from None
        if type(value) is not kind:
            raise ModelError(f"'{key}' must be {kind.__name__}, not {type(value).__name__}")
        return value

    def string(self, key: str, default: str = _REQUIRED) -> str:
        return self._read(key, str, default)

    def flag(self, key: str, default: bool = _REQUIRED) -> bool:
        return self._read(key, bool, default)

    def number(self, key: str, default: float = _REQUIRED) -> float:
        return self._read(key, float, default)

    def count(self, key: str, default: int = _REQUIRED) -> int:
        """A whole number above zero."""
        value = self._read(key, int, default)
        if value <= 0:
            raise ModelError(f"'{key}' must be above zero, not {value}")
        return value

    def token(self, key: str, vocab_size: int) -> int | None:
        """A token id below `vocab_size`, or None where the key is missing."""
        if key not in self:
            return None
        token = self._read(key, int, 0)
        if not 0 <= token < vocab_size:
            raise ModelError(f"'{key}' is {token}, not an id below {vocab_size}")
        return token

    def strings(self, key: str) -> list[str]:
        return self._list(key, str)

    def ints(self, key: str) -> list[int]:
        return self._list(key, int)

    def _list(self, key: str, kind: type[T]) -> list[T]:
        values: list[T] = self._read(key, list, _REQUIRED)
        if not all(type(value) is kind for value in values):
            raise ModelError(f"'{key}' must hold {kind.__name__} alone")
        return values
