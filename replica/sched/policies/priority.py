"""Strict priority."""

from __future__ import annotations

from replica.sched.order import Rank, StaticPolicy, Task


class Priority(StaticPolicy):
    """Higher `priority` first, then arrival: a low one waits for as long as higher ones come."""

    by_priority = True

    def enter(self, task: Task) -> Rank:
        """See Policy."""
        return (-task.priority, task.arrival_s, -task.hit_tokens, task.child)
