"""What a router says about its choices: kept for explain, shown on the dashboard.

Nothing here holds prompts, tokens, block keys, tenants' keys or salts.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class CandidateTerms(msgspec.Struct, frozen=True):
    """The very terms that decided, for one replica, in ms. `score` is larger for better.

    `filtered` names the filter that took the replica out, else None. `locality` says what its
    locality is known from: "digest", or "optimistic" (only what was sent there) without one. `pool`
    says where it is, if several were asked.
    """

    replica: str
    score: float
    saved_prefill_ms: float
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    decode_share_ms: float
    harm_ms: float
    eviction_ms: float
    overload_ms: float
    lateness_ms: float
    overlap_blocks: int
    trust: float
    digest_age_ms: float
    load_age_ms: float
    filtered: str | None = None
    locality: str = "digest"
    pool: str = ""


class RouteDecision(msgspec.Struct, frozen=True, kw_only=True):
    """One choice, reserved in the same call. `queued_tokens`: the prefill that is believed to wait
    there already. `fit_replicas`: how many could have taken it.

    Of the prompt, `matched_tokens` are in the replica's digest. `predicted_cached_tokens` count
    promises in and leave out a last token and a match that is too short; `usable_tokens` are
    these, less what trust and the digest's age take away: what the choice reckoned with.

    `shared_blocks`: the most leading blocks of the prompt that any candidate holds. `forced_off`:
    the candidate that holds more than the chosen one, and lost for what waits there; "" for nobody.

    Where replicas have roles, `hand_off` is "split", or why the prompt was not computed elsewhere
    first; then `prefilled_by` did it, and `hand_off_ms` had passed by then.
    """

    decision_id: str
    request_id: str
    tenant: str
    policy: str
    replica: str
    dispatch_seq: int
    attempt: int
    prompt_tokens: int
    predicted_cached_tokens: int
    predicted_ttft_ms: float
    reason: str
    candidates: Sequence[CandidateTerms]
    decided_us: float
    wall_time_ms: int
    router: str = ""
    queued_tokens: int = 0
    matched_tokens: int = 0
    usable_tokens: int = 0
    shared_blocks: int = 0
    forced_off: str = ""
    fit_replicas: int = 0
    hand_off: str = ""
    prefilled_by: str = ""
    hand_off_ms: float = 0.0


class RouteOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What happened then; joined with the decision by its id. `cached_tokens` were really skipped;
    `matched_tokens` and `usable_tokens` are the decision's, to be compared with."""

    decision_id: str
    replica: str
    status: str
    cached_tokens: int
    prompt_tokens: int
    completion_tokens: int
    ttft_ms: float | None
    e2e_ms: float
    wall_time_ms: int
    matched_tokens: int = 0
    usable_tokens: int = 0
