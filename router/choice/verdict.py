"""What is said of a choice: why it was made, whom it passed over, whether it came too late."""

from __future__ import annotations

import time

import numpy as np

from events.decision import RouteDecision, RouteOutcome
from router.choice.field import Field
from router.choice.route import NoReplica, Outcome, RouteQuery
from router.choice.sheet import TERMS
from router.policies.base import Candidates, Pick

MAX_RETRY_S = 60.0

_SCORE, _SAVED = map(TERMS.index, ("score", "saved_prefill_ms"))


def reason(query: RouteQuery, pick: Pick) -> str:
    """In a word or a few."""
    if query.computes:
        return "computes for another"
    return pick.reason if query.pin is None else "pinned"


def forced_off(candidates: Candidates, chosen: str) -> str:
    """Whose warm blocks, more than the chosen one's, would have saved more, had less been waiting
    there; "" nobody's."""
    most = candidates.longest_blocks
    best = int(np.where(candidates.overlaps == most, candidates.scores, -np.inf).argmax())
    lost, won = candidates.terms[[best, candidates.replicas.index(chosen)]]
    forced = lost[_SAVED] > won[_SAVED] and lost[_SCORE] < won[_SCORE]
    return candidates.replicas[best] if forced else ""


def too_late(deadline_ms: float, field: Field) -> NoReplica | None:
    """Refuse early what even the soonest replica can't start in time. Only a queue that others may
    leave makes a refusal useful: where none stands, the estimate alone refuses nobody."""
    soonest_ms = field.best.soonest_ms
    if soonest_ms <= deadline_ms or int(field.best.least_queued_tokens) <= 0:
        return None
    retry_s = min(MAX_RETRY_S, max(1.0, 1e-3 * (soonest_ms - deadline_ms)))
    return NoReplica("deadline", retry_s, field.shown())


def report(decision: RouteDecision, outcome: Outcome) -> RouteOutcome:
    """For whoever reads of decisions."""
    return RouteOutcome(
        decision_id=decision.decision_id,
        replica=decision.replica,
        status=outcome.status,
        cached_tokens=outcome.cached_tokens,
        prompt_tokens=outcome.prompt_tokens,
        completion_tokens=outcome.completion_tokens,
        ttft_ms=outcome.ttft_ms,
        e2e_ms=outcome.e2e_ms,
        wall_time_ms=int(1e3 * time.time()),
        matched_tokens=decision.matched_tokens,
        usable_tokens=decision.usable_tokens,
    )
