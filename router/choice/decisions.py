"""The last decisions, joined with what became of them, and totals per policy. Bounded."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from msgspec import Struct

from events.decision import RouteDecision, RouteOutcome


class DecisionRecord(Struct):
    """A decision, and its outcome once there is one."""

    decision: RouteDecision
    outcome: RouteOutcome | None = None


class PolicyTotals(Struct):
    """Tokens of finished requests under one policy; `predicted_cached_tokens` of the same ones."""

    decisions: int = 0
    finished: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_cached_tokens: int = 0


class DecisionLog:
    """The newest `limit` decisions by id."""

    def __init__(self, limit: int) -> None:
        self.totals: defaultdict[str, PolicyTotals] = defaultdict(PolicyTotals)
        self._limit = max(1, limit)
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, decision: RouteDecision) -> None:
        """Keep a decision; the oldest one goes when it is full."""
        self._records[decision.decision_id] = DecisionRecord(decision)
        if len(self._records) > self._limit:
            self._records.popitem(last=False)
        self.totals[decision.policy].decisions += 1

    def join(self, decision: RouteDecision, outcome: RouteOutcome) -> None:
        """The decision's one outcome; counted even when the record itself is gone already."""
        record = self._records.get(decision.decision_id)
        if record is not None:
            record.outcome = outcome
        totals = self.totals[decision.policy]
        totals.finished += 1
        totals.failed += outcome.status != "ok"
        totals.prompt_tokens += outcome.prompt_tokens
        totals.cached_tokens += outcome.cached_tokens
        totals.predicted_cached_tokens += decision.predicted_cached_tokens

    def get(self, decision_id: str) -> DecisionRecord | None:
        """One decision, if it is still kept."""
        return self._records.get(decision_id)

    def attempts(self, request_id: str) -> list[str]:
        """Ids of the request's decisions that are still kept, oldest first: looked for, since it
        is rarely asked."""
        kept = self._records.items()
        return [name for name, record in kept if record.decision.request_id == request_id]

    def latest(self, count: int) -> list[DecisionRecord]:
        """The newest ones, newest first."""
        newest = reversed(self._records.values())
        return [record for record, _ in zip(newest, range(count), strict=False)]
