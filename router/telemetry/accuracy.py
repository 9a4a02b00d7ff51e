"""What was predicted of answered requests, and what came true: by replica and tenant.

Three kinds of cached tokens are told apart. Matched: the digest says that the replica holds them.
Usable: promises counted in, less what a last token, a short match and lost trust take away: what
the choice reckoned with. Skipped: what the replica really found cached.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator

from msgspec import Struct

from router.fleet.trust import Prediction
from router.telemetry.tally import OTHERS, TopNames

WRONG_BLOCKS = 2
MAX_REPLICAS = 1_024
"""The one that answered longest ago goes first."""
UNCOUNTED = 32
"""Answers that are counted in one go, or when somebody reads the sums."""


class Sums(Struct):
    """Over answered requests. `wrong_depth`: those whose digest promised over `WRONG_BLOCKS` blocks
    more than were found."""

    answered: int = 0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    usable_tokens: int = 0
    skipped_tokens: int = 0
    predicted_ttft_ms: float = 0.0
    ttft_ms: float = 0.0
    wrong_depth: int = 0

    def add(self, other: Sums) -> None:
        """Count the other's requests in."""
        self.answered += other.answered
        self.prompt_tokens += other.prompt_tokens
        self.matched_tokens += other.matched_tokens
        self.usable_tokens += other.usable_tokens
        self.skipped_tokens += other.skipped_tokens
        self.predicted_ttft_ms += other.predicted_ttft_ms
        self.ttft_ms += other.ttft_ms
        self.wrong_depth += other.wrong_depth

    @property
    def wrong_depth_ratio(self) -> float:
        """The share of such requests; 0 before the first."""
        return self.wrong_depth / self.answered if self.answered else 0.0


class Accuracy:
    """At most `MAX_REPLICAS` replicas, and for each the busiest tenants and one sum of the rest."""

    def __init__(self) -> None:
        self._total = Sums()
        self._uncounted: list[tuple[str, str, Sums]] = []
        self._tenants = TopNames(self._drop_tenant)
        self._of: OrderedDict[str, defaultdict[str, Sums]] = OrderedDict()

    def observe(
        self,
        replica: str,
        tenant: str,
        block_tokens: int,
        predicted: Prediction,
        prompt_tokens: int,
        skipped_tokens: int,
        ttft_ms: float,
    ) -> None:
        """A first token came. `skipped_tokens` were found cached."""
        matched_tokens = predicted.matched_tokens
        one = Sums(
            1,
            prompt_tokens,
            matched_tokens,
            predicted.usable_tokens,
            skipped_tokens,
            predicted.ttft_ms,
            ttft_ms,
            1 if matched_tokens - skipped_tokens > WRONG_BLOCKS * block_tokens else 0,
        )
        self._uncounted.append((replica, tenant, one))
        if len(self._uncounted) >= UNCOUNTED:
            self._count()

    @property
    def total(self) -> Sums:
        """All that was ever observed."""
        self._count()
        return self._total

    def by_tenant(self, replica: str) -> dict[str, Sums]:
        """The replica's sums by tenant; `tally.OTHERS` has the rest."""
        self._count()
        return self._of.get(replica, {})

    def read(self, value: Callable[[Sums], float]) -> Iterator[tuple[tuple[str, str], float]]:
        """For the metrics: one number by (replica, tenant)."""
        self._count()
        for replica, tenants in self._of.items():
            for tenant, sums in tenants.items():
                yield (replica, tenant), value(sums)

    def _count(self) -> None:
        for replica, tenant, one in self._uncounted:
            self._total.add(one)
            self._sums(replica, self._tenants.label(tenant)).add(one)
        self._uncounted.clear()

    def _sums(self, replica: str, tenant: str) -> Sums:
        tenants = self._of.setdefault(replica, defaultdict(Sums))
        self._of.move_to_end(replica)
        if len(self._of) > MAX_REPLICAS:
            self._of.popitem(last=False)
        return tenants[tenant]

    def _drop_tenant(self, tenant: str) -> None:
        for tenants in self._of.values():
            if (sums := tenants.pop(tenant, None)) is not None:
                tenants[OTHERS].add(sums)
