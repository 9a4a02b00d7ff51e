"""Adapters for a scheduler: in memory when the test says so."""

from __future__ import annotations

from collections.abc import Callable


class FakeAdapters:
    """See replica.engine.messages.AdapterLoader. `open`: loads under way, oldest first. An
    `instant` one has none: each comes when it is asked for."""

    def __init__(self, *names: str, instant: bool = False) -> None:
        self._instant = instant
        self.names = frozenset(names)
        self.resident: set[str] = set()
        self.open: list[str] = []
        self.dropped: list[str] = []
        self._landed: Callable[[str, bool], None] = lambda name, loaded: None

    def attach(self, landed: Callable[[str, bool], None]) -> None:
        self._landed = landed

    def load(self, name: str) -> None:
        assert name in self.names
        assert name not in self.resident
        assert name not in self.open
        self.open.append(name)
        if self._instant:
            self.finish(name)

    def drop(self, name: str) -> None:
        self.resident.remove(name)
        self.dropped.append(name)

    def close(self) -> None:
        self.open.clear()

    def finish(self, name: str, loaded: bool = True) -> None:
        """The terminal event of a load."""
        self.open.remove(name)
        if loaded:
            self.resident.add(name)
        self._landed(name, loaded)

    def finish_all(self) -> None:
        """All that are under way come."""
        for name in list(self.open):
            self.finish(name)
