"""What the gateway's tests share: a plain chooser, jobs."""

from __future__ import annotations

import itertools
import struct
from collections import Counter

from events.decision import RouteDecision
from events.request import SamplingParams
from kvstore.identity import KeyChain
from router.choice.route import NoReplica, Outcome, RouteQuery
from router.dispatch.job import Job


class PlainChooser:
    """Least booked first; keeps what was reported for each decision."""

    def __init__(self) -> None:
        self.linked: set[str] = set()
        self.booked: Counter[str] = Counter()
        self.decisions: dict[str, RouteDecision] = {}
        self.first_tokens: list[str] = []
        self.outcomes: list[tuple[str, Outcome]] = []
        self._numbers = itertools.count(1)

    def decide(self, query: RouteQuery) -> RouteDecision | NoReplica:
        free = sorted(self.linked - query.exclude)
        if not free:
            return NoReplica("nobody is there", 1.0)
        replica = min(free, key=lambda name: self.booked[name])
        self.booked[replica] += 1
        number = next(self._numbers)
        decision = RouteDecision(
            decision_id=f"d{number}",
            request_id=query.request_id,
            tenant=query.tenant,
            policy="plain",
            replica=replica,
            dispatch_seq=number,
            attempt=query.attempt,
            prompt_tokens=query.prompt_tokens,
            predicted_cached_tokens=0,
            predicted_ttft_ms=0.0,
            reason="test",
            candidates=(),
            decided_us=0.0,
            wall_time_ms=0,
        )
        self.decisions[decision.decision_id] = decision
        return decision

    def first_token(self, decision_id: str, cached: int, prompt: int, ttft_ms: float) -> None:
        self.first_tokens.append(decision_id)

    def finish(self, decision_id: str, outcome: Outcome) -> Outcome:
        self.outcomes.append((decision_id, outcome))
        self.booked[self.decisions[decision_id].replica] -= 1
        return outcome

    def link_state(self, replica: str, boot: int, up: bool) -> None:
        (self.linked.add if up else self.linked.discard)(replica)

    @property
    def statuses(self) -> list[str]:
        return [outcome.status for _, outcome in self.outcomes]


class Deaf:
    """A RouteListener that only counts."""

    def __init__(self) -> None:
        self.decisions = 0
        self.continuations = 0
        self.ends = 0

    def decided(self, decision: RouteDecision) -> None:
        self.decisions += 1

    def continued(self, decision: RouteDecision, carried_tokens: int) -> None:
        self.continuations += 1

    def ended(self, decision: RouteDecision, outcome: Outcome) -> None:
        self.ends += 1


_job_numbers = itertools.count(1)


def job(**changes: object) -> Job:
    """A small request."""
    prompt = struct.pack("<40I", *range(40))
    settings: dict = {
        "request_id": f"req-{next(_job_numbers)}",
        "tenant": "t",
        "salt": b"s",
        "model": "tiny",
        "pool": "p",
        "block_tokens": 16,
        "prompt": prompt,
        "chain": KeyChain(b"", b""),
        "sampling": SamplingParams(max_tokens=8, seed=1),
        "first_token_timeout_s": 5.0,
        "timeout_s": 10.0,
    }
    return Job(**(settings | changes))
