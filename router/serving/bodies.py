"""Bodies that are being read: their bytes are bounded together, before a byte of them is taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from events.errors import CoreError, UserError
from router.serving.http import Request, read_at_once, read_body
from router.tenancy.pace import retry_after_s
from router.waiting.held import Held

RETRY_S = 1.0


class Bodies:
    """`held`: bytes that were announced, or may come where nothing was."""

    def __init__(self, limit_bytes: int) -> None:
        self.held = Held(limit_bytes)

    async def read(self, request: Request) -> bytes:
        """The whole body. Raises UserError as read_body does, and 429 when too much is on its
        way."""
        announced = request.content_length
        most = request.client_max_size
        size = most if announced is None else min(announced, most)
        self._check(size)
        body = read_at_once(request)
        if body is not None:
            return body
        with self._counted(size):
            return await read_body(request)

    def _check(self, size: int) -> None:
        if len(self.held) and not self.held.fits(size):
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
