"""What a tenant's deadline class means for one request."""

from __future__ import annotations

from msgspec import Struct

from configs.schema import RouterConfig, TenantPolicy

INTERACTIVE_TTFT_MS = 10_000.0
INTERACTIVE_ITL_MS = 250.0
BATCH_PRIORITY = -100


class Deadlines(Struct, frozen=True):
    """Budgets from the start of an attempt. A request that can't meet `ttft_ms` is refused early;
    after `first_token_timeout_s` it is ended."""

    first_token_timeout_s: float
    ttft_ms: float
    itl_ms: float | None
    priority: int


def deadlines_of(policy: TenantPolicy, config: RouterConfig) -> Deadlines:
    """interactive: soon or not at all. standard: within the router's limits. batch: after everybody
    else, as late as it may be."""
    batch = policy.deadline_class == "batch"
    interactive = policy.deadline_class == "interactive"
    limit_s = config.request_timeout_s if batch else config.first_token_timeout_s
    ttft_ms = min(1000 * limit_s, INTERACTIVE_TTFT_MS) if interactive else 1000 * limit_s
    return Deadlines(
        first_token_timeout_s=limit_s,
        ttft_ms=policy.ttft_deadline_ms or ttft_ms,
        itl_ms=policy.itl_deadline_ms or (INTERACTIVE_ITL_MS if interactive else None),
        priority=BATCH_PRIORITY if batch else policy.priority,
    )
