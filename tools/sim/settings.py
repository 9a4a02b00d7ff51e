"""What one simulation is of."""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import Eviction, ReplicaConfig, RouterConfig
from events.load import BOTH, DECODE, PREFILL
from tools.sim.faults import Fault
from tools.sim.profiles import DEVICES, Device
from tools.sim.tiers import TierSpec
from tools.sim.wire import RELIABLE, BusFaults

CLAIRVOYANT = "clairvoyant"
SOUGHT = "sought"
"""Stands for the load where that is what was looked for."""

NOBODY_KEEPS_MS = 1e-3
"""Between two tokens."""

MAX_TOKENS = 1 << 28
"""Of a pool or a store: each block of it takes memory here too."""

DEFAULT_DEVICE = DEVICES["h100-8b"]
ITL_TARGET_MS = ReplicaConfig(id="").itl_target_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`load`: device time that the requests would take without any cache, as a multiple of what
    the replicas have; None leaves the trace's own times. `speeds` scales replicas by name; `muted`
    names those without events; `tiers` lie below the device, nearest first. Beside `replicas` that
    do everything, `prefill` and `decode` of the other roles. `itl_deadline_ms` is what requests
    say of their gaps; where prompts are `always_split`, all are handed off that can be; of fewer
    than `split_min_tokens` none is. Raises ValueError where names are nobody's, all are to die,
    prompts have no way to those that answer, or nobody could hold so many tokens."""

    policy: str
    replicas: int = 8
    prefill: int = 0
    decode: int = 0
    always_split: bool = False
    split_min_tokens: int = RouterConfig().split_min_tokens
    load: float | None = 0.75
    device: Device = DEFAULT_DEVICE
    kv_tokens: int = 1_048_576
    itl_target_ms: float = ITL_TARGET_MS
    itl_deadline_ms: float | None = None
    eviction: Eviction = "segmented"
    tiers: tuple[TierSpec, ...] = ()
    seed: int = 1
    bus: BusFaults = RELIABLE
    speeds: tuple[tuple[str, float], ...] = ()
    muted: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    fast_forward: bool = True

    def __post_init__(self) -> None:
        named = {*dict(self.speeds), *self.muted}
        named |= {fault.replica for fault in self.faults if fault.replica}
        joining = {fault.replica for fault in self.faults if fault.what == "join"}
        if twice := sorted(joining & set(self.names)):
            raise ValueError(f"replica '{twice[0]}' is there from the start")
        if unknown := sorted(named - joining - set(self.names)):
            raise ValueError(f"no replica '{unknown[0]}': they are {', '.join(self.names)}")
        if not self.replicas + self.decode:
            raise ValueError("some replicas have to answer")
        if not set(self.names) - {f.replica for f in self.faults if f.what == "die"}:
            raise ValueError("all replicas are to die: nobody would answer")
        if self.prefill and not any(tier.shared for tier in self.tiers):
            raise ValueError("those that compute prompts need a store that all share")
        if max(self.kv_tokens, *(tier.tokens for tier in self.tiers), 0) > MAX_TOKENS:
            raise ValueError(f"a pool or a store holds {MAX_TOKENS:,} tokens at most")

    @property
    def promised_ms(self) -> float | None:
        """What the router is told of gaps: of prompts that are always split, that nobody keeps
        it."""
        return NOBODY_KEEPS_MS if self.always_split else self.itl_deadline_ms

    @property
    def names(self) -> tuple[str, ...]:
        """The replicas: r0, r1, ..., those of the other roles p0, ... and d0, ..."""
        return (
            *(f"r{number}" for number in range(self.replicas)),
            *(f"p{number}" for number in range(self.prefill)),
            *(f"d{number}" for number in range(self.decode)),
        )

    def role(self, name: str) -> str:
        """What a replica of that name is there for."""
        return {"p": PREFILL, "d": DECODE}.get(name[0], BOTH)
