"""First come, first served."""

from __future__ import annotations

from replica.sched.order import Rank, StaticPolicy, Task


class FirstCome(StaticPolicy):
    """By arrival alone."""

    def enter(self, task: Task) -> Rank:
        """See Policy."""
        return (task.arrival_s, -task.hit_tokens, task.child)
