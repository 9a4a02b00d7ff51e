"""Filter and price one replica after another: what router/choice/score.py must agree with."""

from __future__ import annotations

from dataclasses import dataclass

from events.decision import CandidateTerms
from kvstore.identity import KeyChain
from router.choice.reserve import Ledger
from router.choice.route import RouteQuery
from router.fleet.fleet import Fleet
from router.fleet.member import Member
from router.locality.optimistic import OptimisticEntries
from router.policies.base import Candidate as Bare
from tests.router.kit import promised
from tests.router.oracle.cost import (
    Demand,
    Price,
    Standing,
    Surroundings,
    price,
    reused,
    standing,
)

MIN_MATCH_TOKENS = 32
"""A shorter match is not worth following, and may be a digest's false positive."""


class Candidate(Bare, frozen=True):
    """With its terms."""

    terms: CandidateTerms


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate and what the reservation needs of it."""

    candidate: Candidate
    member: Member
    price: Price
    cached_tokens: int
    digest_blocks: int
    digest_known: bool


@dataclass(frozen=True, slots=True)
class Field:
    """Everybody of the pool: those that may take the request, and why the others may not."""

    scored: dict[str, Scored]
    filtered: tuple[CandidateTerms, ...]

    def candidates(self) -> list[Candidate]:
        """What a policy sees."""
        return [scored.candidate for scored in self.scored.values()]


class Scorer:
    """Reads the fleet, the ledger and the optimistic entries."""

    def __init__(
        self, fleet: Fleet, ledger: Ledger, optimistic: OptimisticEntries, router_boot: str
    ) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._optimistic = optimistic
        self._router_boot = router_boot

    def survey(self, query: RouteQuery, output_tokens: float, now_s: float) -> Field:
        """Filter and price. `output_tokens` is the length to expect of the answer."""
        demand = Demand(
            query.prompt_tokens,
            min(output_tokens, query.max_tokens),
            query.block_tokens,
            query.ttft_deadline_ms,
        )
        fit: list[Member] = []
        filtered: list[CandidateTerms] = []
        for member in self._fleet.members(query.pool):
            why = self._unfit(query, member, now_s)
            if why is None:
                fit.append(member)
            else:
                filtered.append(_without_terms(member, why, now_s))
        fit, unheard = _heard(fit, now_s)
        filtered += [_without_terms(member, "unheard", now_s) for member in unheard]
        depths = self._depths(query) if fit else {}
        standings = [self._standing(member, now_s) for member in fit]
        around = Surroundings(
            idle_ms=min((m.prefill.predict_ms(0, query.prompt_tokens) for m in fit), default=0.0),
            crowd_ms=min((at.queue_ms for at in standings), default=0.0),
            busy=sum(member.usage.share for member in fit) / max(1, len(fit)),
            reused=reused(fit),
            now_s=now_s,
        )
        scored = {
            member.replica: self._score(query, demand, member, at, depths, around)
            for member, at in zip(fit, standings, strict=True)
        }
        return Field(scored, tuple(filtered))

    def _unfit(self, query: RouteQuery, member: Member, now_s: float) -> str | None:
        if query.pin is not None and member.replica != query.pin:
            return "not_pinned"
        if member.replica in query.exclude:
            return "excluded"
        needed = -(-(query.prompt_tokens + 1) // query.block_tokens)
        if query.prompt_tokens >= member.hello.context_tokens or needed > member.total_blocks:
            return "too_long"
        return member.unavailable(now_s)

    def _depths(self, query: RouteQuery) -> dict[str, int]:
        depths = self._fleet.index.depths(query.pool, query.chain.halves())
        for replica in [replica for replica in depths if self._fleet.member(replica) is None]:
            del depths[replica]
            self._fleet.index.remove(replica)
        return depths

    def _promised(self, chain: KeyChain) -> dict[str, int]:
        return promised(self._optimistic, chain)

    def _standing(self, member: Member, now_s: float) -> Standing:
        if member.load is not None:
            seen = member.load.seen.get(self._router_boot, 0)
            self._ledger.note_seen(member.replica, seen)
        return standing(member, self._ledger.booked(member.replica), now_s)

    def _score(
        self,
        query: RouteQuery,
        demand: Demand,
        member: Member,
        at: Standing,
        depths: dict[str, int],
        around: Surroundings,
    ) -> Scored:
        replica = member.replica
        digest = depths.get(replica, 0)
        blocks = max(digest, self._promised(query.chain).get(replica, 0))
        cached = _cached_tokens(query, blocks)
        if not cached:
            blocks = 0
        priced = price(demand, blocks, cached, blocks > digest, member, at, around)
        candidate = _candidate(replica, blocks, at, priced.terms)
        return Scored(candidate, member, priced, cached, digest, replica in depths)


def _heard(fit: list[Member], now_s: float) -> tuple[list[Member], list[Member]]:
    """Those to choose from, and those left out: while some are heard, who is not may well hang.
    Where nobody is, it is the bus that is silent."""
    unheard = [member for member in fit if member.unheard(now_s)]
    if len(unheard) == len(fit):
        return fit, []
    return [member for member in fit if member not in unheard], unheard


def _cached_tokens(query: RouteQuery, blocks: int) -> int:
    """Prompt tokens that need no computing; the last one always does."""
    cached = min(blocks * query.block_tokens, query.prompt_tokens - 1)
    return cached if cached >= MIN_MATCH_TOKENS else 0


def _candidate(replica: str, blocks: int, at: Standing, terms: CandidateTerms) -> Candidate:
    return Candidate(
        replica=replica,
        overlap_blocks=blocks,
        requests=at.requests,
        queued_prefill_tokens=at.queued_prefill_tokens,
        used_blocks=at.used_blocks,
        total_blocks=at.total_blocks,
        terms=terms,
    )


def _without_terms(member: Member, why: str, now_s: float) -> CandidateTerms:
    return CandidateTerms(
        replica=member.replica,
        score=0.0,
        saved_prefill_ms=0.0,
        queue_ms=0.0,
        prefill_ms=0.0,
        transfer_ms=0.0,
        decode_share_ms=0.0,
        harm_ms=0.0,
        eviction_ms=0.0,
        overload_ms=0.0,
        lateness_ms=0.0,
        overlap_blocks=0,
        trust=member.trust.value,
        digest_age_ms=1e3 * (now_s - member.digest_at_s),
        load_age_ms=1e3 * (now_s - member.load_at_s),
        filtered=why,
        locality="digest" if member.unknown_since_s is None else "optimistic",
    )
