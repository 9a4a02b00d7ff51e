"""How much of an arena one user, or one owner, may have, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ArenaLimits:
    """`scope_share`: how much of the arena one owner may take where `scope_bytes` doesn't say;
    public blocks may take all of it. Past `write_s` and `lease_s` a user is overdue."""

    scope_share: float = 0.5
    scope_bytes: Mapping[bytes, int] = field(default_factory=dict)
    write_s: float = 10.0
    lease_s: float = 30.0
    session_writes: int = 1_024
    session_leases: int = 4_096
    pinned_share: float = 0.5
