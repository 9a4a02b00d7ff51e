"""The words between dispatch and choice: what is asked, and what happened then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct
from msgspec.structs import replace

from events.decision import CandidateTerms, RouteDecision
from kvstore.identity import KeyChain

if TYPE_CHECKING:
    from router.policies.base import Candidates


class HandOff(Struct, frozen=True):
    """What came of computing a prompt at one replica for another one to answer: `verdict` is
    "split", or why not. `blocks` leading ones of it lie in `store` then, computed by `prefill`
    within `took_ms`."""

    verdict: str
    prefill: str = ""
    store: str = ""
    blocks: int = 0
    took_ms: float = 0.0


class RouteQuery(Struct, frozen=True):
    """One attempt to place one request. `pool` names the fingerprint pool whose chain this is.

    `exclude` holds replicas that already failed this request. `pin` asks for one replica by name
    (warming, tests); then locality, load and roles only explain. `computes`: no answer is wanted,
    only the prompt's blocks, of a replica that computes them for others. `hand_off`: what such a
    one has done before. `adapter`: name and digest of the LoRA adapter that it needs.
    `itl_deadline_ms`: the objective for its gaps between tokens, in the mean. `beside`: the other
    pools that were asked, with what is shown of them.
    """

    request_id: str
    attempt: int
    tenant: str
    pool: str
    chain: KeyChain
    prompt_tokens: int
    max_tokens: int
    block_tokens: int
    ttft_deadline_ms: float | None = None
    itl_deadline_ms: float | None = None
    priority: int = 0
    exclude: frozenset[str] = frozenset()
    pin: str | None = None
    public_cut_blocks: int = 0
    computes: bool = False
    hand_off: HandOff | None = None
    adapter: tuple[str, str] | None = None
    beside: tuple[tuple[str, Sequence[CandidateTerms]], ...] = ()


class Outcome(Struct, frozen=True):
    """How an attempt ended, as dispatch saw it.

    status: "ok", "client_gone", "refused", "transport", "timeout", "error". `replica_fault` tells
    whether the breaker may count it (never for a caller's mistake). Where the cached tokens were
    not told, 0 says nothing.
    """

    status: str
    replica_fault: bool
    cached_tokens: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft_ms: float | None = None
    e2e_ms: float = 0.0
    cached_told: bool = True


def within(outcome: Outcome, most_prompt_tokens: float) -> Outcome:
    """The outcome with what can be of its counts."""
    if 0 <= outcome.cached_tokens <= outcome.prompt_tokens <= most_prompt_tokens:
        return outcome
    prompt_tokens = int(min(max(0, outcome.prompt_tokens), most_prompt_tokens))
    cached_tokens = min(max(0, outcome.cached_tokens), prompt_tokens)
    return replace(outcome, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)


@dataclass(frozen=True, slots=True)
class NoReplica:
    """Nobody can take the request now: `reason` is for the error body, the rest for Retry-After."""

    reason: str
    retry_after_s: float
    candidates: Sequence[CandidateTerms] = ()


class Chooser(Protocol):
    """Choice and its bookkeeping. All methods are synchronous: no await lies between the choice
    and its reservation."""

    def decide(self, query: RouteQuery) -> RouteDecision | NoReplica:
        """Filter, score, choose, reserve. The reservation holds until `finish` or its expiry."""

    def survey(self, query: RouteQuery) -> Candidates:
        """What each replica that could take it would cost now."""

    def first_token(
        self, decision_id: str, cached_tokens: int | None, prompt_tokens: int, ttft_ms: float
    ) -> None:
        """The prefill is over: its reservation shrinks to decode, prediction meets reality. With
        None for the cached tokens it meets it at the end."""

    def prefill_overdue(self, decision_id: str) -> None:
        """By all that was learnt its prefill is over, but nobody was heard there since: it costs
        whoever comes next as before, and holds nobody up. Idempotent."""

    def assume_prefilled(self, decision_id: str) -> None:
        """The replica lives, and by all that was learnt the prefill is over. Idempotent."""

    def finish(self, decision_id: str, outcome: Outcome) -> Outcome:
        """Release the reservation; idempotent: only the first call per decision counts. What of the
        outcome is believed: no replica has found more cached than it was sent."""
