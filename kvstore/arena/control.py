"""The seam between moving bytes and the arena's books, which may be another process's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.arena.arena import Arena
from kvstore.arena.messages import Finished, Opened, Place, Refusal, Want
from kvstore.arena.segment import Segment


class Control(Protocol):
    """One session of one arena, for one thread. Every method raises StoreError where the books
    can't be reached by the deadline; then all that the session held is gone."""

    @property
    def segment(self) -> Segment:
        """The memory that places lie in."""

    def reserve(self, wants: Sequence[Want], deadline: float) -> Sequence[Place | Refusal]:
        """See Arena."""

    def commit(self, finished: Sequence[Finished], deadline: float) -> Sequence[bool]:
        """See Arena."""

    def abort(self, places: Sequence[Place]) -> None:
        """See Arena."""

    def open(self, keys: Sequence[bytes], deadline: float) -> Sequence[Opened]:
        """See Arena."""

    def release(self, places: Sequence[Place]) -> None:
        """See Arena."""

    def exists_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Arena."""

    def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Arena."""

    def purge(self, owner: bytes | None, deadline: float) -> int:
        """See Arena."""

    def interrupt(self) -> None:
        """From another thread: the call that waits now raises AbandonedError. Not while a slot is
        touched, since everything is given back."""

    def close(self) -> None:
        """Gives everything back. Idempotent."""


class LocalControl:
    """A session of an arena of this process."""

    def __init__(self, arena: Arena, name: str) -> None:
        self.segment = arena.segment
        self._arena = arena
        self._session = arena.session(name)

    def reserve(self, wants: Sequence[Want], deadline: float) -> Sequence[Place | Refusal]:
        """See Arena."""
        self._arena.tick()
        return self._arena.reserve(self._session, wants)

    def commit(self, finished: Sequence[Finished], deadline: float) -> Sequence[bool]:
        """See Arena."""
        return self._arena.commit(self._session, finished)

    def abort(self, places: Sequence[Place]) -> None:
        """See Arena."""
        self._arena.abort(self._session, places)

    def open(self, keys: Sequence[bytes], deadline: float) -> Sequence[Opened]:
        """See Arena."""
        return self._arena.open(self._session, keys)

    def release(self, places: Sequence[Place]) -> None:
        """See Arena."""
        self._arena.release(self._session, places)

    def exists_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Arena."""
        return self._arena.exists_prefix(keys)

    def delete(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Arena."""
        return self._arena.delete(keys)

    def purge(self, owner: bytes | None, deadline: float) -> int:
        """See Arena."""
        return self._arena.purge(owner)

    def interrupt(self) -> None:
        """No call waits."""

    def close(self) -> None:
        """Gives everything back."""
        self._arena.end(self._session)
