"""The policy hook: in which order requests are served. A policy orders, it never admits.

The rank is fixed at intake, so a preempted request keeps its place. Victims are taken from the far
end of the very same order.
"""

from __future__ import annotations

from collections.abc import Callable

from replica.engine.messages import EngineRequest

Rank = tuple[float, ...]
Policy = Callable[[EngineRequest], Rank]
"""Smaller ranks are served first; ranks of different children must differ."""


def first_come(spec: EngineRequest) -> Rank:
    """Higher `priority` first, then arrival; the child's number breaks ties."""
    return (-spec.priority, spec.arrival_s, spec.child)
