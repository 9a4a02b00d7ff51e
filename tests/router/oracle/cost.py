"""The cost of one replica, in plain Python: what router/choice/cost.py must agree with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from events.decision import CandidateTerms
from events.load import DecodeFit, PrefillFit
from router.choice.reserve import Booked
from router.fleet.member import Member, ReplicaState

OWN_DECODE_WEIGHT = 0.03
"""A ms of slower decoding, spread over the answer, hurts less than a ms before its first token."""
HARM_WEIGHT = 0.05
BUSY_WEIGHT = 2
CROWD_WEIGHT = 1
MIN_IDLE = 0.05
MAX_OCCUPANCY_WEIGHT = 4.0
"""Who comes next waits for this prefill too, the more of them the busier the fleet is."""

REUSE_GUESS = 0.5
REUSE_GUESS_TOKENS = 10_000
"""Before the fleet has seen so many prompt tokens, its hit ratio says little."""

LATENESS_WEIGHT = 4.0
SUSPECT_MS = 250.0
MAX_BACKLOG_AGEING_MS = 500.0
FRESH_DIGEST_S = 5.0
DIGEST_HALF_LIFE_S = 15.0


@dataclass(frozen=True, slots=True)
class Demand:
    """What the request asks of any replica; deadlines in ms from now."""

    prompt_tokens: int
    output_tokens: float
    block_tokens: int
    ttft_deadline_ms: float | None


@dataclass(frozen=True, slots=True)
class Standing:
    """One replica's load with this router's own unseen dispatches counted in."""

    requests: int
    rows: int
    context_tokens: int
    queue_ms: float
    queued_prefill_tokens: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    total_blocks: int
    prefills_ms: list[float]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is equal for all candidates of one choice. `idle_ms`: the request's cost on the fastest
    replica, were it idle and empty. `crowd_ms`: the shortest queue. `busy`: the mean share of the
    time that prefills take. `reused`: the share of all prompts' tokens that is found cached."""

    idle_ms: float
    crowd_ms: float
    busy: float
    reused: float
    now_s: float


@dataclass(frozen=True, slots=True)
class Price:
    """The terms, and what the ledger and the decision need of the way to them."""

    terms: CandidateTerms
    ttft_ms: float
    new_blocks: int


def standing(member: Member, booked: Booked, now_s: float) -> Standing:
    """Published load plus what no report has seen yet; a backlog shrinks while nobody reports."""
    load, hello = member.load, member.hello
    if load is None:
        return Standing(
            requests=booked.requests,
            rows=booked.requests - booked.prefilling,
            context_tokens=booked.unseen_context_tokens,
            queue_ms=booked.unseen_prefill_ms,
            queued_prefill_tokens=booked.unseen_prefill_tokens,
            free_blocks=hello.total_blocks - booked.unseen_blocks,
            cached_blocks=0,
            used_blocks=booked.unseen_blocks,
            total_blocks=hello.total_blocks,
            prefills_ms=booked.prefill_ms_of_size,
        )
    requests = load.waiting + load.running + booked.unseen_requests
    prefilling = max(load.waiting + booked.unseen_prefilling, booked.prefilling)
    return Standing(
        requests=requests,
        rows=max(0, requests - prefilling),
        context_tokens=load.running_context_tokens + booked.unseen_context_tokens,
        queue_ms=_backlog_ms(member, now_s) + booked.unseen_prefill_ms,
        queued_prefill_tokens=load.queued_prefill_tokens + booked.unseen_prefill_tokens,
        free_blocks=load.free_blocks - booked.unseen_blocks,
        cached_blocks=load.cached_blocks,
        used_blocks=load.total_blocks
        - load.free_blocks
        - load.cached_blocks
        + booked.unseen_blocks,
        total_blocks=load.total_blocks,
        prefills_ms=booked.prefill_ms_of_size,
    )


def _backlog_ms(member: Member, now_s: float) -> float:
    load = member.load
    if load is None or load.queued_prefill_tokens <= 0:
        return 0.0
    prompts = max(1, load.waiting)
    published = prompts * member.prefill.predict_ms(0, load.queued_prefill_tokens / prompts)
    age_ms = min(1e3 * (now_s - member.load_at_s), MAX_BACKLOG_AGEING_MS)
    return max(0.0, published - age_ms)


def credit(member: Member, now_s: float) -> float:
    """How much of a match counts, in [0, 1]: trust, and the age of the digest."""
    if member.unknown_since_s is not None:
        return member.trust.value
    stale_s = max(0.0, now_s - member.digest_at_s - FRESH_DIGEST_S)
    return member.trust.value * math.exp2(-stale_s / DIGEST_HALF_LIFE_S)


def price(
    demand: Demand,
    overlap_blocks: int,
    cached_tokens: int,
    waits: bool,
    member: Member,
    at: Standing,
    around: Surroundings,
) -> Price:
    """The cost of the request on this replica, and its score: larger is better."""
    now_s = around.now_s
    cold_ms, warm_ms = _prefill_ms(demand.prompt_tokens, cached_tokens, member.prefill)
    saved_ms = credit(member, now_s) * (cold_ms - warm_ms)
    prefill_ms = cold_ms - saved_ms
    ahead, overtaken = (1.0, 0.0) if waits else _ahead(at.prefills_ms, prefill_ms)
    queue_ms = at.queue_ms * ahead
    before = at.queued_prefill_tokens * ahead
    mixing_ms = _mixing_ms(before + demand.prompt_tokens - cached_tokens, at, member)
    ttft_ms = queue_ms + prefill_ms + mixing_ms
    needed = _blocks(demand) - cached_tokens // demand.block_tokens
    decode_share_ms = mixing_ms + _own_decode_ms(demand, at, member.decode)
    occupancy = _occupancy(around, cold_ms)
    harm_ms = prefill_ms * (occupancy + overtaken + HARM_WEIGHT * max(0, at.rows))
    eviction_ms = around.reused * _evicted_ms(needed, demand.block_tokens, member, at)
    overload_ms = _overload_ms(demand, needed, member, at, now_s)
    lateness_ms = _lateness_ms(ttft_ms, demand.ttft_deadline_ms)
    cost_ms = queue_ms + prefill_ms + decode_share_ms + harm_ms
    cost_ms += eviction_ms + overload_ms + lateness_ms
    terms = CandidateTerms(
        replica=member.replica,
        score=around.idle_ms - cost_ms,
        saved_prefill_ms=saved_ms,
        queue_ms=queue_ms,
        prefill_ms=prefill_ms,
        transfer_ms=0.0,
        decode_share_ms=decode_share_ms,
        harm_ms=harm_ms,
        eviction_ms=eviction_ms,
        overload_ms=overload_ms,
        lateness_ms=lateness_ms,
        overlap_blocks=overlap_blocks,
        trust=member.trust.value,
        digest_age_ms=1e3 * (now_s - member.digest_at_s),
        load_age_ms=1e3 * (now_s - member.load_at_s),
        locality="digest" if member.unknown_since_s is None else "optimistic",
    )
    return Price(terms, ttft_ms, needed)


def _occupancy(around: Surroundings, cold_ms: float) -> float:
    """What a ms of the engine is worth to those who come next."""
    crowding = CROWD_WEIGHT * around.crowd_ms / cold_ms if cold_ms > 0 else 0.0
    steady = BUSY_WEIGHT * around.busy**2 / max(MIN_IDLE, 1.0 - around.busy)
    return min(MAX_OCCUPANCY_WEIGHT, steady + crowding)


def _prefill_ms(prompt_tokens: int, cached_tokens: int, fit: PrefillFit) -> tuple[float, float]:
    cold = fit.predict_ms(0, prompt_tokens)
    return cold, min(cold, fit.predict_ms(cached_tokens, prompt_tokens - cached_tokens))


def _ahead(prefills_ms: list[float], prefill_ms: float) -> tuple[float, float]:
    """The share of the known prefills that are no longer than this one, and how many are. A class
    of sizes is four times the one before; the first one is below 4 ms."""
    if sum(prefills_ms) <= 1e-3:
        return 1.0, 0.0
    prefills_ms = [max(0.0, ms) for ms in prefills_ms]
    size = min(6, max(0, math.floor(math.log(max(prefill_ms, 1e-9), 4))))
    overtaken = sum(ms / (2 * 4**of) for of, ms in enumerate(prefills_ms) if of > size)
    return sum(prefills_ms[: size + 1]) / sum(prefills_ms), overtaken


def _mixing_ms(tokens: float, at: Standing, member: Member) -> float:
    """The running decodes share every step of the prefills ahead and of our own."""
    if at.rows <= 0:
        return 0.0
    fit = member.decode
    steps = math.ceil(tokens / member.hello.max_step_tokens)
    return steps * max(0.0, fit.per_row * at.rows + fit.per_context * at.context_tokens)


def _own_decode_ms(demand: Demand, at: Standing, fit: DecodeFit) -> float:
    alone = fit.predict_ms(1, demand.prompt_tokens)
    shared = fit.predict_ms(at.requests + 1, at.context_tokens + demand.prompt_tokens)
    return OWN_DECODE_WEIGHT * demand.output_tokens * max(0.0, shared - alone)


def _blocks(demand: Demand) -> int:
    return math.ceil((demand.prompt_tokens + demand.output_tokens) / demand.block_tokens)


def reused(members: Sequence[Member]) -> float:
    """The share of the fleet's prompt tokens that it finds cached."""
    loads = [member.load for member in members if member.load is not None]
    cached = sum(load.cached_tokens_total for load in loads) + REUSE_GUESS * REUSE_GUESS_TOKENS
    seen = sum(load.prompt_tokens_total for load in loads) + REUSE_GUESS_TOKENS
    return min(1.0, cached / seen)


def _evicted_ms(needed: int, block_tokens: int, member: Member, at: Standing) -> float:
    """Cached blocks that must go, by what it takes to compute them again. The fuller a replica,
    the sooner it must evict, so room that is left elsewhere is used first."""
    load = member.load
    if load is None or needed <= 0:
        return 0.0
    free = max(0, at.free_blocks)
    fullness = 1.0 - min(1.0, free / max(1, at.total_blocks))
    evicted = min(max(needed - free, needed * fullness**2), at.cached_blocks)
    return member.prefill.b * evicted * block_tokens


def _overload_ms(demand: Demand, needed: int, member: Member, at: Standing, now_s: float) -> float:
    """Waiting for a running slot, computing again what lack of KV preempts, and suspicion."""
    slots = max(1, member.hello.max_running)
    ahead = max(0, at.requests + 1 - slots)
    step_ms = member.decode.predict_ms(min(slots, at.requests), at.context_tokens)
    slot_ms = ahead / slots * demand.output_tokens * step_ms
    short = max(0, needed - max(0, at.free_blocks) - at.cached_blocks)
    short_ms = 2.0 * member.prefill.b * short * demand.block_tokens
    suspect = member.state(now_s) is ReplicaState.SUSPECT
    suspect_ms = SUSPECT_MS * max(1, member.breaker.failures) if suspect else 0.0
    return slot_ms + short_ms + suspect_ms


def _lateness_ms(ttft_ms: float, deadline_ms: float | None) -> float:
    return 0.0 if deadline_ms is None else LATENESS_WEIGHT * max(0.0, ttft_ms - deadline_ms)
