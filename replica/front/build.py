"""Puts a front together: the engine comes first, its sink before it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from replica.engine.messages import Engine
from replica.front.app import FrontApp
from replica.front.attempts import Attempts
from replica.front.health import Progress
from replica.front.intake import Intake, Served
from replica.front.link import LinkServer, LinkSettings
from replica.front.metrics import Metrics
from replica.front.output import Dispatcher, StepQueue
from replica.front.session import Front


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a full mailbox may stay full, and an engine with work may stand still."""

    slow_s: float = 30.0
    stall_s: float = 30.0


def build_front(
    engine: Engine,
    queue: StepQueue,
    served: Served,
    link: LinkSettings,
    patience: Patience,
    clock: Callable[[], float] = time.monotonic,
) -> FrontApp:
    """A front over `engine`, whose sink `queue` is. On the event loop."""
    metrics = Metrics()
    counters = metrics.counters
    attempts = Attempts(engine, counters, patience.slow_s, served.mailboxes_bytes, clock)
    queue.attach(Dispatcher(engine, attempts, counters))
    intake = Intake(engine, attempts, served, counters, clock)
    front = Front(engine, attempts, intake, counters)
    progress = Progress(patience.stall_s, clock)
    return FrontApp(front, LinkServer(front, link), metrics, progress)
