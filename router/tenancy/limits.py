"""What each tenant may use a minute and at once. Refusals and headers are OpenAI's.

Buckets refill continuously on monotonic time. There is one account for each tenant of the
registry, and none for anybody else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from events.errors import CoreError, UserError
from router.tenancy.others import ALONE, Others
from router.tenancy.pace import retry_after_s
from router.tenancy.tenant_tally import Tallies, Tally
from router.tenancy.tenants import Tenant

MINUTE_S = 60.0
OWED_MIN = 2
"""Whatever answers came to, and whatever other routers tell, a tenant is back within this time."""


class Bucket:
    """At most `per_min` at once, and as much a minute. What came beyond what was expected is owed:
    the level may be below zero, by what `OWED_MIN` minutes bring at most."""

    __slots__ = ("_at_s", "_level", "per_min")

    def __init__(self, per_min: int, now_s: float) -> None:
        self.per_min = per_min
        self._level = float(per_min)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """What is there now."""
        refilled = self._level + (now_s - self._at_s) * self.per_min / MINUTE_S
        self._level, self._at_s = min(float(self.per_min), refilled), now_s
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until so much is there."""
        return max(0.0, amount - self.level(now_s)) * MINUTE_S / self.per_min

    def take(self, amount: float) -> None:
        """Take it, or with a negative amount give it back."""
        full = float(self.per_min)
        self._level = max(-OWED_MIN * full, min(full, self._level - amount))


def _bucket(known: Bucket | None, per_min: int, now_s: float) -> Bucket | None:
    """The bucket for a limit; one whose limit was changed keeps what was used of it."""
    if not per_min:
        return None
    if known is None:
        return Bucket(per_min, now_s)
    if known.per_min != per_min:
        used = known.per_min - known.level(now_s)
        known = Bucket(per_min, now_s)
        known.take(used)
    return known


def _duration(seconds: float) -> str:
    """As OpenAI writes it: "120ms", "1.5s", "6m0s"."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{math.ceil(rest)}s" if minutes else f"{rest:.3g}s"


def _headers(kind: str, bucket: Bucket, now_s: float) -> dict[str, str]:
    remaining = max(0, math.floor(bucket.level(now_s)))
    return {
        f"x-ratelimit-limit-{kind}": str(bucket.per_min),
        f"x-ratelimit-remaining-{kind}": str(remaining),
        f"x-ratelimit-reset-{kind}": _duration(bucket.wait_s(bucket.per_min, now_s)),
    }


class Account:
    """What one tenant uses; what was refused it is in its tally."""

    def __init__(
        self,
        name: str,
        tallies: Tallies,
        clock: Callable[[], float],
        others: Others,
    ) -> None:
        self.tenant: Tenant | None = None
        self._name = name
        self._tallies = tallies
        self._others = others
        self._max_concurrent = 0
        self.inside = 0
        self._clock = clock
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None

    @property
    def tally(self) -> Tally:
        """Where the tenant is counted now."""
        return self._tallies.of(self._name)

    def follow(self, tenant: Tenant) -> None:
        """Take over the limits of the tenant's policy."""
        self.tenant = tenant
        policy = tenant.policy
        self._max_concurrent = policy.max_concurrent
        if not (policy.requests_per_min or policy.tokens_per_min):
            self._requests = self._tokens = None
            return
        now_s = self._clock()
        self._requests = _bucket(self._requests, policy.requests_per_min, now_s)
        self._tokens = _bucket(self._tokens, policy.tokens_per_min, now_s)

    def headers(self) -> dict[str, str]:
        """x-ratelimit-*, for the limits that there are."""
        said: dict[str, str] = {}
        if self._requests is None and self._tokens is None:
            return said
        now_s = self._clock()
        if self._requests is not None:
            said |= _headers("requests", self._requests, now_s)
        if self._tokens is not None:
            said |= _headers("tokens", self._tokens, now_s)
        return said

    @property
    def shared_inside(self) -> int:
        """Requests that are inside, where their number is limited."""
        return self.inside if self._max_concurrent else 0

    def enter(self) -> None:
        """Count a request until it leaves. Raises UserError (429)."""
        limit = self._max_concurrent
        if limit and self.inside + self._others.elsewhere(self._name).requests >= limit:
            raise self._refusal("concurrency", "requests", f"{limit} at once", 1.0)
        if self._requests is not None:
            wait_s = self._requests.wait_s(1, self._clock())
            if wait_s > 0:
                rate = f"{self._requests.per_min} a minute"
                raise self._refusal("requests", "requests", rate, wait_s)
            self._requests.take(1)
            self._others.spent(self._name, 1, 0)
        self.inside += 1
        if limit:
            self._others.touched(self._name)

    def leave(self) -> None:
        """A request that was counted has ended."""
        self.inside -= 1
        if self._max_concurrent:
            self._others.touched(self._name)

    def book_tokens(self, tokens: int) -> None:
        """Take what a request is expected to come to. Raises UserError (429), or 413 for what the
        limit can never let through."""
        if self._tokens is None:
            return
        limit = self._tokens.per_min
        if tokens > limit:
            self.tally.refused["tokens"] += 1
            message = f"the request counts for {tokens} tokens; {limit} a minute are allowed"
            raise UserError(CoreError(status=413, message=message, code="request_too_large"))
        wait_s = self._tokens.wait_s(tokens, self._clock())
        if wait_s > 0:
            raise self._refusal("tokens", "tokens", f"{limit} a minute", wait_s)
        self._tokens.take(tokens)
        self._others.spent(self._name, 0, tokens)

    def correct_tokens(self, more: int) -> None:
        """A request came to so many more than was booked (or to less: negative)."""
        if self._tokens is not None:
            self._tokens.level(self._clock())
            self._tokens.take(more)
            self._others.spent(self._name, 0, more)

    def spent_elsewhere(self, requests: int, tokens: int) -> None:
        """Another router let that through: it goes off the same limits."""
        for bucket, amount in ((self._requests, requests), (self._tokens, tokens)):
            if bucket is not None:
                bucket.level(self._clock())
                bucket.take(amount)

    def _refusal(self, reason: str, kind: str, limit: str, wait_s: float) -> UserError:
        self.tally.refused[reason] += 1
        return UserError(
            CoreError(
                status=429,
                message=f"Rate limit reached on {kind}: {limit}. Please try again later.",
                type=kind,
                code="rate_limit_exceeded",
                retry_after_s=retry_after_s(wait_s),
            )
        )


class Limits:
    """The accounts."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        tallies: Tallies | None = None,
    ) -> None:
        self.tallies = tallies or Tallies()
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._others = ALONE

    def share(self, others: Others) -> None:
        """With the other routers, before the first account is asked for."""
        self._others = others

    def inside(self, name: str) -> int:
        """Requests of a tenant that are inside, where their number is limited."""
        account = self._accounts.get(name)
        return 0 if account is None else account.shared_inside

    def names(self) -> list[str]:
        """Tenants that have an account."""
        return list(self._accounts)

    def account(self, tenant: Tenant) -> Account:
        """The tenant's account, with the limits that its policy has now."""
        account = self._accounts.get(tenant.name)
        if account is None:
            account = Account(tenant.name, self.tallies, self._clock, self._others)
            self._accounts[tenant.name] = account
        if account.tenant is not tenant:
            account.follow(tenant)
        return account

    def forget(self, name: str) -> None:
        """The tenant was removed. What it has inside still ends on its old account."""
        self._accounts.pop(name, None)
        self.tallies.forget(name)
