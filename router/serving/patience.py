"""A client that waits for its turn hears that we live, before it or a proxy on the way hangs up.

The first sign opens the stream, so its status is told from then on: a refusal that comes later is
an error event, and the stream breaks.
"""

from __future__ import annotations

from router.serving.sse import KEEP_ALIVE, EventWriter


class Comments:
    """Implements router.waiting.queue.Patience over a stream's writer."""

    def __init__(self, writer: EventWriter, every_s: float) -> None:
        self.every_s = every_s
        self._writer = writer

    async def show(self) -> None:
        """A comment, behind the head. Raises ReaderGoneError."""
        if not self._writer.response.prepared:
            await self._writer.open({})
        await self._writer.write(KEEP_ALIVE)
