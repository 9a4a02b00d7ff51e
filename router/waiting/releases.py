"""What one request holds, given back when it ends: the last taken first, however it ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class Releases:
    """As contextlib.ExitStack, for what doesn't ask why it ends, in a third of the steps: each
    request has one."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def __enter__(self) -> Releases:
        return self

    def __exit__(self, *error: object) -> None:
        steps = self._steps
        try:
            while steps:
                steps.pop()()
        finally:
            if steps:  # the rest is given back, whatever one of them raised
                self.__exit__(*error)

    def add(self, step: Callable[[], object]) -> None:
        """To be called at the end."""
        self._steps.append(step)

    def enter(self, held: AbstractContextManager[T]) -> T:
        """Enter it; left at the end."""
        value = held.__enter__()
        self._steps.append(partial(held.__exit__, None, None, None))
        return value
