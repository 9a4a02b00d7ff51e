"""What one simulation is of."""

from __future__ import annotations

from dataclasses import dataclass

from tools.sim.profiles import DEVICES, Device
from tools.sim.wire import RELIABLE, BusFaults

CLAIRVOYANT = "clairvoyant"
DEFAULT_DEVICE = DEVICES["h100-8b"]


@dataclass(frozen=True, slots=True)
class Fault:
    """At `at_s` after the first arrival something happens to a replica: "die", "restart" (an empty
    cache, a new boot), or to the router: "router" (it forgets everything)."""

    at_s: float
    what: str
    replica: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`load`: device time that the requests would take without any cache, as a multiple of what
    the replicas have. `speeds` scales replicas by name; `muted` names those without events."""

    policy: str
    replicas: int = 8
    load: float = 0.75
    device: Device = DEFAULT_DEVICE
    kv_tokens: int = 1_048_576
    seed: int = 1
    bus: BusFaults = RELIABLE
    speeds: tuple[tuple[str, float], ...] = ()
    muted: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    fast_forward: bool = True
