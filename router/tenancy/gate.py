"""The door: who comes in, and how much may be inside at once."""

from __future__ import annotations

import asyncio
import hmac
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

from configs.schema import RouterConfig
from events.errors import CoreError, UserError
from router.dispatch.job import Job
from router.tenancy.pace import DrainRate, retry_after_s
from router.tenancy.tenants import Tenant, Tenants, hash_key
from router.waiting.held import Held

ADMIN_HEADER = "x-warmroute-admin"


def _unauthorized(message: str, code: str | None) -> UserError:
    return UserError(CoreError(status=401, message=message, code=code))


def bearer(headers: Mapping[str, str]) -> str | None:
    """The key of an Authorization header; None without one. Raises UserError (401)."""
    value = headers.get("Authorization")
    if value is None:
        return None
    scheme, _, key = value.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise _unauthorized("The Authorization header must be 'Bearer <key>'.", "invalid_api_key")
    return key.strip()


def basic_password(headers: Mapping[str, str]) -> str | None:
    """The password of HTTP's Basic scheme (what a browser asks its user for), whoever the user."""
    scheme, _, encoded = headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return b64decode(encoded, validate=True).decode().partition(":")[2]
    except ValueError:
        return None


class Admission:
    """What one request counts for: what was expected of it, or what it has come to.

    `held_tokens`: its prompts, and what was generated so far. `waited_s`: for its turn. `on_begin`
    is called when the first token has come. Leaving the context manager gives it back."""

    __slots__ = ("_gate", "held_tokens", "on_begin", "tokens", "waited_s")

    def __init__(self, gate: Gate, tokens: int, prompt_tokens: int) -> None:
        self.tokens = tokens
        self.waited_s = 0.0
        self.on_begin: Callable[[], None] | None = None
        self.held_tokens = prompt_tokens
        self._gate = gate

    def __enter__(self) -> Admission:
        return self

    def __exit__(self, *_: object) -> None:
        self._gate.left(self)

    def grow(self, tokens: int) -> None:
        """That many more were generated. Refuses nothing: it is whoever comes next that waits."""
        if self.on_begin is not None:
            self.on_begin()
            self.on_begin = None
        self.held_tokens += tokens
        more = self.held_tokens - self.tokens
        if more > 0:
            self.tokens += more
            self._gate.tokens += more


class Gate:
    """Keys and bounds. What comes in is counted until it has left."""

    def __init__(
        self,
        config: RouterConfig,
        tenants: Tenants,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.held = Held(config.max_connections, clock)
        self.refused: Counter[str] = Counter()
        self.tokens = 0
        self._config = config
        self._tenants = tenants
        self._drained = DrainRate(clock)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def requests(self) -> int:
        """Inside now."""
        return len(self.held)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Until nobody is inside; False when that takes too long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def authenticate(self, headers: Mapping[str, str]) -> Tenant:
        """The tenant behind the key. Raises UserError (401)."""
        key = bearer(headers)
        if key is None and self._config.allow_anonymous:
            return self._tenants.anonymous
        if key is None:
            message = "You didn't provide an API key: send it as 'Authorization: Bearer <key>'."
            raise _unauthorized(message, None)
        tenant = self._tenants.of_key(key)
        if tenant is None:
            raise _unauthorized("Incorrect API key provided.", "invalid_api_key")
        return tenant

    def check_admin(self, headers: Mapping[str, str]) -> None:
        """Raises UserError: 403 where no admin key is configured, 401 for a wrong one."""
        wanted = self._config.admin_key_sha256
        if not wanted:
            message = "this router has no admin key: its changing routes are closed"
            raise UserError(CoreError(status=403, message=message, code="admin_closed"))
        key = headers.get(ADMIN_HEADER) or basic_password(headers) or bearer(headers) or ""
        if not hmac.compare_digest(hash_key(key).hex(), wanted.lower()):
            raise _unauthorized("The admin key is missing or wrong.", "invalid_api_key")

    def check_reader(self, headers: Mapping[str, str]) -> None:
        """Whoever may ask without a key may also look; else looking needs the admin key."""
        if not self._config.allow_anonymous:
            self.check_admin(headers)

    def enter(self, visitor: Hashable) -> None:
        """Count one request until it leaves. Raises UserError (503) over the bound."""
        if not self.held.fits(1):
            self.held.refused["full"] += 1
            raise UserError(
                CoreError(
                    status=503,
                    message="too many requests at once",
                    type="server_error",
                    code="overloaded",
                    retry_after_s=retry_after_s(1.0),
                ),
                "requests",
            )
        if not self.held.depth:
            self._idle.clear()
        self.held.add(visitor, 1)

    def leave(self, visitor: Hashable) -> None:
        """A request that was counted has ended."""
        self.held.remove(visitor)
        if not self.held.depth:
            self._idle.set()

    def expected_tokens(self, jobs: Sequence[Job]) -> int:
        """What the jobs of a request count for before they run."""
        expected = self._config.expected_answer_tokens
        return sum([job.expected_tokens(expected) for job in jobs])

    def admitted(self, jobs: Sequence[Job], tokens: int) -> Admission:
        """Count the `tokens` that the jobs of a request are expected to come to, until it has
        `left`: leaving the context manager does that, too. Raises UserError (413, 429)."""
        limit = self._config.max_inflight_tokens
        if tokens > limit:
            message = f"the request counts for {tokens} tokens; {limit} are allowed at once"
            raise UserError(CoreError(status=413, message=message, code="request_too_large"))
        if self.tokens + tokens > limit:
            self.refused["full"] += 1
            raise self._full(self.tokens + tokens - limit)
        self.tokens += tokens
        return Admission(self, tokens, sum([job.prompt_tokens for job in jobs]))

    def left(self, admission: Admission) -> None:
        """What it came to is free again."""
        self.tokens -= admission.tokens
        self._drained.add(admission.tokens)

    def _full(self, excess_tokens: int) -> UserError:
        return UserError(
            CoreError(
                status=429,
                message="too many tokens in flight",
                type="tokens",
                code="rate_limit_exceeded",
                retry_after_s=retry_after_s(self._drained.wait_s(excess_tokens)),
            ),
            "tokens",
        )
