"""Bodies that are being read: their bytes are bounded together, before a byte of them is taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from events.errors import CoreError, UserError
from router.serving.http import Request, read_at_once, read_body
from router.tenancy.pace import retry_after_s
from router.waiting.held import Held

RETRY_S = 1.0


def _size_of(request: Request) -> int:
    """At most, in bytes."""
    announced, most = request.content_length, request.client_max_size
    return most if announced is None else min(announced, most)


class Bodies:
    """`held`: bytes that were announced, or may come where nothing was."""

    def __init__(self, limit_bytes: int) -> None:
        self.held = Held(limit_bytes)

    def at_once(self, request: Request) -> bytes | None:
        """The body where all of it is there; None where it has to be `read`. Raises UserError: 429
        when too much is on its way."""
        if self.held.depth:
            self._check(_size_of(request))
        return read_at_once(request)

    async def read(self, request: Request) -> bytes:
        """The whole body. Raises UserError as read_body does, and as `at_once`."""
        with self._counted(_size_of(request)):
            return await read_body(request)

    def _check(self, size: int) -> None:
        if self.held.depth and not self.held.fits(size):
            raise self._full()

    @contextmanager
    def _counted(self, size: int) -> Iterator[None]:
        self._check(size)
        owner = object()
        self.held.add(owner, size)
        try:
            yield
        finally:
            self.held.remove(owner)

    def _full(self) -> UserError:
        self.held.refused["full"] += 1
        return UserError(
            CoreError(
                status=429,
                message="too much is being uploaded at once",
                type="server_error",
                code="overloaded",
                retry_after_s=retry_after_s(RETRY_S),
            ),
            "body",
        )
