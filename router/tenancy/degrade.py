"""Less for whoever agreed to it, while much is waiting: shorter answers rather than refusals.

A tenant's policy names what may be made less. It is said in a header, and nothing is done that the
policy doesn't name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec import structs

from router.openai.schema import ChatRequest, CompletionRequest
from router.tenancy.tenants import Tenant

MARK = 0.25
"""Of the queue's bounds: from here on."""
FLOOR_TOKENS = 256
"""An answer may always be that long."""

Asked = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class Degraded:
    """What is served instead; `names` of what was made less, in the policy's words."""

    asked: Asked
    tenant: Tenant
    names: tuple[str, ...] = ()


def degraded(tenant: Tenant, asked: Asked, room_tokens: int) -> Degraded:
    """All that the policy allows and that makes a difference. `room_tokens`: what the context
    leaves for an answer, which is what one without a limit may take."""
    controls, names = asked.controls, []
    for name, less in (
        ("max_tokens", _shorter(asked, room_tokens)),
        ("n", {"n": 1, "best_of": None} if controls.answers > 1 else {}),
        ("logprobs", {"logprobs": 0 if controls.logprobs else controls.logprobs}),
    ):
        changed = structs.replace(controls, **less)
        if name in tenant.policy.degrade and changed != controls:
            controls = changed
            names.append(name)
    if "batch" in tenant.policy.degrade and tenant.policy.deadline_class != "batch":
        policy = structs.replace(
            tenant.policy, deadline_class="batch", ttft_deadline_ms=0.0, itl_deadline_ms=0.0
        )
        tenant = replace(tenant, policy=policy)
        names.append("batch")
    return Degraded(structs.replace(asked, controls=controls), tenant, tuple(names))


def _shorter(asked: Asked, room_tokens: int) -> dict[str, int | None]:
    wanted = asked.controls.max_tokens
    if wanted is None and isinstance(asked, ChatRequest):
        wanted = room_tokens
    if wanted is None or wanted <= FLOOR_TOKENS:
        return {}
    return {"max_tokens": min(wanted, FLOOR_TOKENS)}
