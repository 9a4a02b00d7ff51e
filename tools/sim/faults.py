"""What goes wrong in a run, as flags say it: slow replicas, silent ones, deaths and restarts."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Literal, get_args

What = Literal["die", "restart", "join", "router"]


@dataclass(frozen=True, slots=True)
class Fault:
    """At `at_s` after the first arrival something happens to a replica: "die", "restart" (an empty
    cache, a new boot), "join" (one more of a new name), or to the router: "router" (it forgets
    everything)."""

    at_s: float
    what: What
    replica: str = ""

    def __str__(self) -> str:
        return f"{self.at_s:g}:{self.what}" + (f":{self.replica}" if self.replica else "")


def fault(text: str) -> Fault:
    """`30:restart:r0`, `30:die:r0`, `30:join:r8` or `30:router`."""
    at, what, replica = (*text.split(":"), "", "")[:3]
    if what not in get_args(What) or (what == "router") != (not replica) or text.count(":") > 2:
        raise argparse.ArgumentTypeError("takes SECONDS:die|restart|join:REPLICA or SECONDS:router")
    at_s = float(at)
    if not 0 <= at_s < math.inf:
        raise argparse.ArgumentTypeError("takes seconds from 0 on")
    return Fault(at_s, what, replica)  # type: ignore[arg-type]


def speed(text: str) -> tuple[str, float]:
    """`r0=0.5`: that replica takes twice as long for everything."""
    replica, _, share = text.partition("=")
    number = float(share) if share else 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("takes REPLICA=SPEED, 1 being the device's own")
    return replica, number
