"""A second policy that scores live traffic and routes nothing: how would its choices differ?

It sees what the policy in force saw, and so caches and queues that the policy in force made. The
report tells how the two differ choice by choice, not what the other one would have made of the
traffic by itself.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from events.decision import RouteDecision
from router.choice.field import Field
from router.choice.route import RouteQuery
from router.policies import make_policy
from router.policies.base import Policy

log = logging.getLogger(__name__)

DIFFERENCES_KEPT = 32


@dataclass(slots=True)
class Predicted:
    """Sums over the compared decisions."""

    cached_tokens: int = 0
    ttft_ms: float = 0.0

    def add(self, cached_tokens: int, ttft_ms: float) -> None:
        """One more decision."""
        self.cached_tokens += cached_tokens
        self.ttft_ms += ttft_ms


@dataclass(slots=True)
class Comparison:
    """The shadow beside one policy that was in force."""

    compared: int = 0
    agreed: int = 0
    live: Predicted = field(default_factory=Predicted)
    shadow: Predicted = field(default_factory=Predicted)


@dataclass(frozen=True, slots=True)
class Difference:
    """One choice on which the two did not agree: the shadow's prediction less the live one's."""

    decision_id: str
    replica: str
    shadow_replica: str
    cached_tokens: int
    ttft_ms: float


class Shadow:
    """Belongs to the brain. Has a generator of its own: with or without it the same is chosen.
    `on`: there is a policy to compare with."""

    def __init__(self, name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.set_policy(name)

    @property
    def policy(self) -> str | None:
        """The name of the policy in the shadow, None without one."""
        return self._policy.name if self._policy is not None else None

    def set_policy(self, name: str) -> None:
        """Compare with this one, "" with none, from now on and from zero. Raises ValueError."""
        self._policy: Policy | None = make_policy(name) if name else None
        self.on = self._policy is not None
        self._rng = random.Random()
        self._since_s = self._clock()
        self._by_policy: dict[str, Comparison] = {}
        self._differences: deque[Difference] = deque(maxlen=DIFFERENCES_KEPT)
        self.failed = 0

    def watch(self, query: RouteQuery, seen: Field, decision: RouteDecision) -> None:
        """A decision was made from `seen`. Never raises. Where there was no choice, because of a
        pin or a single candidate, there is nothing to compare."""
        if self._policy is None or query.pin is not None or len(seen) < 2:
            return
        try:
            self._compare(self._policy, query, seen, decision)
        except Exception as error:
            self.failed += 1
            if self.failed == 1:
                log.error("shadow policy %s failed: %s", self.policy, type(error).__name__)

    def _compare(
        self, policy: Policy, query: RouteQuery, seen: Field, decision: RouteDecision
    ) -> None:
        pick = policy.pick(query, seen, self._rng)
        policy.placed(query, seen, pick)
        other = seen.scored(pick.replica)
        cached_tokens, ttft_ms = other.cached_tokens, other.ttft_ms
        of = self._by_policy.setdefault(decision.policy, Comparison())
        of.compared += 1
        of.live.add(decision.predicted_cached_tokens, decision.predicted_ttft_ms)
        of.shadow.add(cached_tokens, ttft_ms)
        if pick.replica == decision.replica:
            of.agreed += 1
            return
        self._differences.append(
            Difference(
                decision_id=decision.decision_id,
                replica=decision.replica,
                shadow_replica=pick.replica,
                cached_tokens=cached_tokens - decision.predicted_cached_tokens,
                ttft_ms=ttft_ms - decision.predicted_ttft_ms,
            )
        )

    def report(self) -> dict[str, Any]:
        """By the policy in force then: counts, predicted sums, and means of shadow less live."""
        return {
            "shadow": self.policy,
            "age_s": round(self._clock() - self._since_s, 3),
            "failed": self.failed,
            "by_policy": {name: _summary(of) for name, of in self._by_policy.items()},
            "differences": list(reversed(self._differences)),
        }

    def counts(self) -> Iterator[tuple[tuple[str, str], int]]:
        """For the metrics: (shadow, result) and how many decisions had it."""
        if self.policy is not None:
            compared = sum(of.compared for of in self._by_policy.values())
            agreed = sum(of.agreed for of in self._by_policy.values())
            yield (self.policy, "agreed"), agreed
            yield (self.policy, "differed"), compared - agreed
            yield (self.policy, "failed"), self.failed

    def predicted(self, read: Callable[[Predicted], float]) -> Iterator[tuple[tuple[str], float]]:
        """For the metrics: one predicted sum of the compared decisions, by side."""
        yield ("live",), sum(read(of.live) for of in self._by_policy.values())
        yield ("shadow",), sum(read(of.shadow) for of in self._by_policy.values())


def _summary(of: Comparison) -> dict[str, Any]:
    live, shadow = of.live, of.shadow
    return {
        "compared": of.compared,
        "agreed": of.agreed,
        "agreement": of.agreed / of.compared,
        "predicted_cached_tokens": {"live": live.cached_tokens, "shadow": shadow.cached_tokens},
        "predicted_ttft_ms": {"live": live.ttft_ms, "shadow": shadow.ttft_ms},
        "mean_difference": {
            "cached_tokens": (shadow.cached_tokens - live.cached_tokens) / of.compared,
            "ttft_ms": (shadow.ttft_ms - live.ttft_ms) / of.compared,
        },
    }
