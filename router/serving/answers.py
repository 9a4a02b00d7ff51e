"""The runs of one HTTP request, one for each of its prompts, read as one stream of deltas."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from operator import attrgetter

from events.output import CoreDelta
from router.dispatch.failover import Run
from router.dispatch.sink import Direct

_is_done = attrgetter("done")
Numbered = tuple[int, CoreDelta]
"""(number of the prompt, delta)."""


def _forget(task: asyncio.Task[tuple[CoreDelta, ...]]) -> None:
    """Nobody waits for this run any more: its error has been told by another one."""
    if not task.cancelled():
        task.exception()


class Answers:
    """A context manager over runs: leaving it releases all of them."""

    def __init__(self, runs: Sequence[Run], revision: str) -> None:
        self.runs = runs
        self._only = runs[0] if len(runs) == 1 else None
        self._revision = revision
        self._reading: dict[asyncio.Task[tuple[CoreDelta, ...]], int] = {}

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *error: object) -> None:
        for task in self._reading:
            task.add_done_callback(_forget)
            task.cancel()
        for run in self.runs:
            run.__exit__(*error)

    @property
    def done(self) -> bool:
        """Whether every answer is complete."""
        return self._only.done if self._only is not None else all(map(_is_done, self.runs))

    def headers(self) -> dict[str, str]:
        """Which decision led where: of the first prompt's newest attempt."""
        attempt = self.runs[0].attempt
        if attempt is None:
            return {}
        return {
            "x-warmroute-decision": attempt.decision.decision_id,
            "x-warmroute-replica": attempt.decision.replica,
            "x-warmroute-revision": self._revision,
        }

    def keep_ours(self) -> None:
        """The answer has our head: no backend can give its rest."""
        for run in self.runs:
            run.may_relay = False

    async def next(self, idle_s: float, direct: Direct | None = None) -> list[Numbered]:
        """What came next, or [] when nothing did within `idle_s`. Raises UserError.

        What comes of the only run may go to `direct` instead; with several, nothing does."""
        if self._only is not None:
            return [(0, delta) for delta in await self._only.next(idle_s, direct)]
        reading = set(self._reading.values())
        for number, run in enumerate(self.runs):
            if not run.done and number not in reading:
                self._reading[asyncio.create_task(run.next(idle_s))] = number
        ready, _ = await asyncio.wait(
            self._reading, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED
        )
        numbered: list[Numbered] = []
        for task in ready:
            number = self._reading.pop(task)
            numbered += [(number, delta) for delta in task.result()]
        return numbered
