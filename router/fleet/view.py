"""One replica for people to look at."""

from __future__ import annotations

from dataclasses import dataclass

from events.load import ReplicaHello, ReplicaLoad
from router.fleet.digests import Digests
from router.fleet.member import Member
from router.locality.falsehits import FalseHits
from router.locality.index import DigestIndex


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica for the dashboard, /metrics and explain. Ages are in ms.

    `locality` says what its warm blocks are known by: its "digest", "optimistic" entries where none
    ever came, or "unknown" for now. `false_positive_rate` of its digest is measured here; the one
    in its load is stated by itself."""

    replica: str
    boot: int
    pool: str
    state: str
    linked: bool
    breaker: str
    misfits: tuple[str, ...]
    trust: float
    ttft_ratio: float
    locality: str
    digest_known: bool
    digest_age_ms: float
    digest_fill: float
    false_positive_rate: float | None
    load_age_ms: float
    load: ReplicaLoad | None
    hello: ReplicaHello


def view_of(
    member: Member, now_s: float, index: DigestIndex, digests: Digests, false_hits: FalseHits
) -> ReplicaView:
    """As it stands now."""
    replica = member.replica
    return ReplicaView(
        replica=replica,
        boot=member.boot,
        pool=member.pool,
        state=member.state(now_s).value,
        linked=member.linked,
        breaker=member.breaker.state(now_s).value,
        misfits=tuple(member.misfits),
        trust=member.trust.value,
        ttft_ratio=member.trust.ttft_ratio,
        locality=digests.locality(member),
        digest_known=index.known(replica),
        digest_age_ms=1e3 * (now_s - member.digest_at_s),
        digest_fill=index.fill(replica),
        false_positive_rate=false_hits.rate(replica),
        load_age_ms=1e3 * (now_s - member.load_at_s),
        load=member.load,
        hello=member.hello,
    )
