"""One replica as the fleet sees it: its current life, its evidence and the age of it, its state."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from events.load import DecodeFit, DigestShape, PrefillFit, ReplicaHello, ReplicaLoad
from router.fleet.breaker import Breaker
from router.fleet.trust import Trust
from router.fleet.usage import Usage

SUSPECT_LOAD_AGE_S = 3.0


class ReplicaState(StrEnum):
    """REFUSED replicas don't fit the router's model; they are listed, never routed to."""

    REFUSED = "refused"
    JOINING = "joining"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DRAINING = "draining"


@dataclass(slots=True)
class Proof:
    """Blocks of a prompt that must be resident for a while, looked for until due: its first one,
    and the first one behind its public head if it has one. uint64 (1, 2) or (2, 2). `shown`: which
    of them were seen. `computed_tokens`: what the replica had computed in all before."""

    blocks: np.ndarray
    due_s: float
    shown: np.ndarray
    computed_tokens: int


class Member:
    """State of one life (one `boot`) of a replica. A larger boot gets a new Member.

    Times are monotonic seconds. `digest_at_s` is the last time that the digest was known to be
    current; `unknown_since_s` is set while it is not known at all. `silent`: the bus has lost it,
    only the link still stands.
    """

    __slots__ = (
        "boot",
        "breaker",
        "decode",
        "digest_at_s",
        "digest_cursor",
        "digest_shape",
        "hello",
        "link_boot",
        "load",
        "load_at_s",
        "misfits",
        "pool",
        "prefill",
        "proof",
        "replica",
        "revision",
        "silent",
        "trust",
        "unknown_since_s",
        "usage",
    )

    def __init__(
        self, replica: str, boot: int, hello: ReplicaHello, pool: str, now_s: float
    ) -> None:
        self.replica = replica
        self.boot = boot
        self.hello = hello
        self.pool = pool
        self.revision = ""
        self.misfits: dict[str, str] = {}
        self.load: ReplicaLoad | None = None
        self.load_at_s = now_s
        self.prefill: PrefillFit
        self.decode: DecodeFit
        self.digest_cursor: tuple[int, int] | None = None
        self.digest_shape: DigestShape | None = None
        self.digest_at_s = now_s
        self.unknown_since_s: float | None = now_s
        self.link_boot: int | None = None
        self.silent = False
        self.proof: Proof | None = None
        self.breaker = Breaker()
        self.trust = Trust()
        self.usage = Usage()

    @property
    def linked(self) -> bool:
        """Whether the link reaches this very life."""
        return self.link_boot == self.boot

    @property
    def total_blocks(self) -> int:
        """KV blocks that it can use now."""
        return self.hello.total_blocks if self.load is None else self.load.total_blocks

    def unheard(self, now_s: float) -> bool:
        """Whether the bus brings nothing of it: it may hang, or only the bus may."""
        return now_s - self.load_at_s > SUSPECT_LOAD_AGE_S

    def state(self, now_s: float) -> ReplicaState:
        """The state now."""
        if self.misfits:
            return ReplicaState.REFUSED
        if self.load is not None and self.load.draining:
            return ReplicaState.DRAINING
        if self.load is None or not self.linked:
            return ReplicaState.JOINING if self.link_boot is None else ReplicaState.SUSPECT
        suspect = self.unheard(now_s) or self.breaker.failures
        return ReplicaState.SUSPECT if suspect else ReplicaState.HEALTHY

    def unavailable(self, now_s: float) -> str | None:
        """Why no request may go there now; None when one may. A silent bus alone is no reason: the
        link is what carries requests."""
        if self.misfits:
            return next(iter(self.misfits))
        if not self.linked:
            return "no_link"
        if self.load is not None and self.load.draining:
            return "draining"
        if not self.breaker.admits(now_s):
            return "breaker_open"
        return None
