"""The choice: survey, pick, reserve, in one synchronous call; and its bookkeeping until the end.

Implements router.route.Chooser. No await lies between a choice and its reservation, so a burst sees
itself. Every reservation is released exactly once: by its outcome, its expiry, or a new life.
"""

from __future__ import annotations

import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable

from msgspec import Struct

from configs.schema import RouterConfig
from events.decision import RouteDecision, RouteOutcome
from events.load import OWN_ENGINE
from router.choice.decisions import DecisionLog
from router.choice.field import Field, Scored
from router.choice.reserve import Ledger, Reservation
from router.choice.route import HandOff, NoReplica, Outcome, RouteQuery, within
from router.choice.score import Scorer
from router.choice.shadow import Shadow
from router.choice.verdict import forced_off, reason, report, too_late
from router.cluster.marks import marks_of
from router.cluster.peers import Peers
from router.fleet.fleet import Fleet
from router.fleet.member import Member
from router.fleet.trust import Prediction
from router.locality.optimistic import OptimisticEntries
from router.policies import make_policy
from router.policies.base import Pick
from router.telemetry.accuracy import Accuracy
from router.telemetry.alarms import Clock

OPTIMISTIC_TTL_S = 5.0
APPROXIMATE_TTL_S = 120.0
"""How long a sent prompt counts as held where no digest ever confirms it."""

EXPIRY_GRACE_S = 30.0
TEND_EVERY_S = 0.02
FIRST_OUTPUT_GUESS_TOKENS = 128.0
OUTPUT_LEARNING_RATE = 0.02
RETRY_S = 2.0

NO_HAND_OFF = HandOff("")

OnDecision = Callable[[RouteDecision], None]
OnOutcome = Callable[[RouteOutcome], None]


class _Open(Struct):
    """A decision that has no outcome yet."""

    decision: RouteDecision
    query: RouteQuery
    boot: int
    prediction: Prediction
    expires_s: float
    answered: bool = False
    observed: bool = False


class RouterBrain:
    """Chooses replicas. `router_boot` is this router's life, as load reports name it; minted here
    when none is given."""

    def __init__(
        self,
        fleet: Fleet,
        config: RouterConfig,
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
        on_decision: OnDecision | None = None,
        on_outcome: OnOutcome | None = None,
        router_boot: str | None = None,
    ) -> None:
        self.fleet = fleet
        self.rng = rng or random.Random()
        self.router_boot = router_boot or f"{config.id}-{self.rng.getrandbits(64):016x}"
        self.ledger = Ledger()
        self.optimistic = OptimisticEntries()
        self.decisions = DecisionLog(config.decisions_kept)
        self.accuracy = Accuracy()
        self._config = config
        self.clock = clock
        self._policy = make_policy(config.policy)
        self.shadow = Shadow(config.shadow_policy, clock)
        self.peers = Peers()
        self._scorer = Scorer(
            fleet,
            self.ledger,
            self.optimistic,
            self.router_boot,
            self.peers,
            config,
        )
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._dispatch_seq = 0
        self._tend_at_s = -math.inf
        self._output_tokens = FIRST_OUTPUT_GUESS_TOKENS
        self._on_decision = on_decision
        self._on_outcome = on_outcome
        fleet.on_fence(self._end_life)

    @property
    def policy(self) -> str:
        """The name of the policy in force."""
        return self._policy.name

    def set_policy(self, name: str) -> None:
        """Choose by another rule from now on. Raises ValueError on an unknown name."""
        self._policy = make_policy(name)

    def decide(self, query: RouteQuery) -> RouteDecision | NoReplica:
        """Filter, score, choose, reserve."""
        now_s = self.clock()
        if now_s >= self._tend_at_s:
            self._tend(now_s)
        field, pick = self._choose(query, now_s)
        if isinstance(pick, NoReplica):
            return pick
        scored = field.scored(pick.replica)
        self._dispatch_seq += 1
        decision_id = f"{self.rng.getrandbits(64):016x}"
        seq = self._dispatch_seq
        decision = self._decision(query, field, pick, scored, decision_id, seq, now_s)
        self._policy.placed(query, field, pick)
        self._reserve(decision, query, scored, now_s)
        self._scorer.placed(query, now_s)
        self.decisions.add(decision)
        if self.shadow.on:
            self.shadow.watch(query, field, decision)
        if self._on_decision is not None:
            self._on_decision(decision)
        return decision

    def survey(self, query: RouteQuery) -> Field:
        """What each replica that could take it would cost now; empty where none can. Use it before
        anything else is asked."""
        now_s = self.clock()
        if now_s >= self._tend_at_s:
            self._tend(now_s)
        return self._scorer.survey(query, self._output_tokens, now_s)

    def helpers(self, pool: str) -> list[Member]:
        """Those that compute prompts, and answer all the same now."""
        return self._scorer.helpers(pool, self._output_tokens, self.clock())

    def explain(self, query: RouteQuery) -> RouteDecision | NoReplica:
        """What `decide` would say now; nothing is reserved or remembered."""
        now_s = self.clock()
        if now_s >= self._tend_at_s:
            self._tend(now_s)
        field, pick = self._choose(query, now_s)
        if isinstance(pick, NoReplica):
            return pick
        scored = field.scored(pick.replica)
        return self._decision(query, field, pick, scored, "", 0, now_s)

    @property
    def output_tokens(self) -> float:
        """The length to expect of an answer."""
        return self._output_tokens

    def uncached_tokens(self, query: RouteQuery) -> int:
        """What of the prompt would have to be computed where most of it is warm."""
        field = self._scorer.survey(query, self._output_tokens, self.clock())
        return query.prompt_tokens - field.most_cached_tokens()

    def first_token(
        self, decision_id: str, cached_tokens: int | None, prompt_tokens: int, ttft_ms: float
    ) -> None:
        """The prefill is over. Idempotent; unknown ids are ignored."""
        entry = self._open.get(decision_id)
        if entry is None or entry.answered:
            return
        self._answered(entry, cached_tokens, ttft_ms)

    def _answered(self, entry: _Open, cached_tokens: int | None, ttft_ms: float) -> None:
        entry.answered = True
        query, decision = entry.query, entry.decision
        self.ledger.first_token(decision.decision_id)
        if cached_tokens is not None:
            self._observe(entry, cached_tokens, ttft_ms)
        chain, cut_blocks = query.chain, query.public_cut_blocks
        self.fleet.replica_alive(decision.replica, entry.boot, chain, cut_blocks)

    def waits(self, decision_id: str) -> bool:
        """Whether nothing was heard of it yet."""
        entry = self._open.get(decision_id)
        return entry is not None and not entry.answered

    def prefill_overdue(self, decision_id: str) -> None:
        """The prefill should be over: its reservation alone knows, and keeps its cost."""
        self.ledger.overdue(decision_id)

    def assume_prefilled(self, decision_id: str) -> None:
        """The prefill is taken to be over: only its reservation knows."""
        self.ledger.first_token(decision_id)

    def finish(self, decision_id: str, outcome: Outcome) -> Outcome:
        """Release, learn, record; what of it is believed. Only the first call for a decision
        counts."""
        entry = self._open.pop(decision_id, None)
        if entry is None:
            return within(outcome, outcome.prompt_tokens)
        outcome = self._believed(entry, outcome)
        if outcome.status == "ok" and outcome.ttft_ms is not None:
            cached_tokens = outcome.cached_tokens if outcome.cached_told else None
            if not entry.answered:
                self._answered(entry, cached_tokens, outcome.ttft_ms)
            elif cached_tokens is not None and not entry.observed:
                self._observe(entry, cached_tokens, outcome.ttft_ms)
        self.ledger.release(decision_id)
        self._learn(entry, outcome)
        told = report(entry.decision, outcome)
        self.decisions.join(entry.decision, told)
        if self._on_outcome is not None:
            self._on_outcome(told)
        return outcome

    def _believed(self, entry: _Open, outcome: Outcome) -> Outcome:
        """Other engines may count a prompt in another way, ours can't."""
        most = entry.decision.prompt_tokens
        if 0 <= outcome.cached_tokens <= outcome.prompt_tokens <= most:
            return outcome
        replica = entry.decision.replica
        member = self.fleet.member(replica)
        ours = member is None or member.hello.engine == OWN_ENGINE
        believed = within(outcome, most if ours else math.inf)
        if believed is not outcome:
            why = "its usage says more than can be: more cached than there was, or a longer prompt"
            self.fleet.alarms.raise_("impossible_usage", replica, why)
        return believed

    def cache_cleared(self, replica: str) -> None:
        """The replica was told to forget its cache: what was promised there is gone too."""
        self.optimistic.forget_replica(replica)
        self.peers.marks.forget_replica(replica)

    def _choose(self, query: RouteQuery, now_s: float) -> tuple[Field, Pick | NoReplica]:
        field = self._scorer.survey(query, self._output_tokens, now_s)
        if not field.replicas:
            return field, self._nobody(query, field, now_s)
        if query.ttft_deadline_ms is not None:
            late = too_late(query.ttft_deadline_ms, field)
            if late is not None:
                return field, late
        return field, self._policy.pick(query, field, self.rng)

    def _nobody(self, query: RouteQuery, field: Field, now_s: float) -> NoReplica:
        """Why nobody can take it, and when asking again may help."""
        kept = field.shown()
        reasons = field.reasons() - {"not_pinned"}
        if query.pin is not None and not reasons:
            return NoReplica("the replica asked for is not there", RETRY_S, kept)
        if reasons == {"too_long"}:
            return NoReplica("too_long", 0.0, kept)
        waits = [
            member.breaker.wait_s(now_s)
            for member in self.fleet.members(query.pool)
            if not member.misfits and member.linked
        ]
        retry_s = min((wait for wait in waits if wait > 0), default=RETRY_S)
        why = f" ({', '.join(sorted(reasons))})" if reasons else ""
        return NoReplica(f"no replica can take the request now{why}", retry_s, kept)

    def _decision(
        self,
        query: RouteQuery,
        field: Field,
        pick: Pick,
        scored: Scored,
        decision_id: str,
        dispatch_seq: int,
        now_s: float,
    ) -> RouteDecision:
        hand_off = query.hand_off or NO_HAND_OFF
        return RouteDecision(
            decision_id=decision_id,
            request_id=query.request_id,
            tenant=query.tenant,
            policy=self._policy.name,
            replica=pick.replica,
            dispatch_seq=dispatch_seq,
            attempt=query.attempt,
            prompt_tokens=query.prompt_tokens,
            predicted_cached_tokens=scored.cached_tokens,
            predicted_ttft_ms=scored.ttft_ms,
            reason=reason(query, pick),
            candidates=field.shown(pick.replica),
            decided_us=1e6 * (self.clock() - now_s),
            wall_time_ms=int(1e3 * time.time()),
            router=self._config.id,
            queued_tokens=scored.queued_tokens,
            matched_tokens=scored.digest_blocks * query.block_tokens,
            usable_tokens=scored.usable_tokens,
            shared_blocks=field.longest_blocks,
            forced_off=""
            if scored.overlap_blocks >= field.longest_blocks
            else forced_off(field, pick.replica),
            fit_replicas=len(field.replicas),
            hand_off=hand_off.verdict,
            prefilled_by=hand_off.prefill if hand_off.blocks else "",
            hand_off_ms=hand_off.took_ms,
        )

    def _reserve(
        self, decision: RouteDecision, query: RouteQuery, scored: Scored, now_s: float
    ) -> None:
        member, cached = scored.member, scored.cached_tokens
        new_tokens = query.prompt_tokens - cached
        expires_s = now_s + self._config.request_timeout_s + EXPIRY_GRACE_S
        self.ledger.reserve(
            Reservation(
                decision_id=decision.decision_id,
                replica=decision.replica,
                dispatch_seq=decision.dispatch_seq,
                prefill_tokens=new_tokens,
                prefill_ms=member.prefill.predict_ms(cached, new_tokens),
                context_tokens=query.prompt_tokens,
                blocks=scored.new_blocks,
                prefill_until_s=now_s + self._config.first_token_timeout_s + EXPIRY_GRACE_S,
                expires_s=expires_s,
                marks=b"" if self.peers.alone else marks_of(query.chain, scored.digest_blocks),
            )
        )
        if not member.breaker.closed:
            self.fleet.on_trial(member, now_s)
        if scored.digest_blocks < query.chain.blocks:
            until_s = now_s + self._optimistic_ttl_s(scored)
            self.optimistic.remember(decision.replica, decision.decision_id, query.chain, until_s)
        # A digest is judged by what it shows, not by what is on its way, or would be fetched.
        shown = self.fleet.index.known(decision.replica)
        held = min(cached, decision.matched_tokens) if shown or scored.fetched else cached
        prediction = Prediction(
            held,
            scored.ttft_ms,
            decision.matched_tokens,
            decision.usable_tokens,
            scored.fetched,
        )
        self._open[decision.decision_id] = _Open(
            decision, query, member.boot, prediction, expires_s
        )

    def _observe(self, entry: _Open, cached_tokens: int, ttft_ms: float) -> None:
        """Prediction meets reality, once."""
        if not entry.observed:
            entry.observed = True
            replica, query = entry.decision.replica, entry.query
            cached_tokens = min(max(0, cached_tokens), query.prompt_tokens)
            self.fleet.observe(replica, entry.boot, entry.prediction, cached_tokens, ttft_ms)
            self.accuracy.observe(
                replica,
                query.tenant,
                query.block_tokens,
                entry.prediction,
                query.prompt_tokens,
                cached_tokens,
                ttft_ms,
            )

    def _optimistic_ttl_s(self, scored: Scored) -> float:
        known = self.fleet.index.known(scored.member.replica)
        if not known or scored.member.trust.nothing_matches:
            return APPROXIMATE_TTL_S
        return OPTIMISTIC_TTL_S + 1e-3 * min(scored.ttft_ms, 1e3 * APPROXIMATE_TTL_S)

    def _learn(self, entry: _Open, outcome: Outcome) -> None:
        replica, boot = entry.decision.replica, entry.boot
        if outcome.replica_fault:
            self.fleet.replica_failed(replica, boot)
        elif outcome.status == "ok":
            self.fleet.replica_served(replica, boot)
            if entry.query.pin is None:
                error = outcome.completion_tokens - self._output_tokens
                self._output_tokens += OUTPUT_LEARNING_RATE * error
        else:
            self.fleet.replica_undecided(replica, boot)
        kept = outcome.status == "ok" or (entry.answered and not outcome.replica_fault)
        if not kept:
            self.optimistic.forget_decision(entry.decision.decision_id)

    def _tend(self, now_s: float) -> None:
        """What comes with time, at most every so often: it need not be exact."""
        self._tend_at_s = now_s + TEND_EVERY_S
        self.fleet.check()
        self.ledger.expire(now_s)
        self.optimistic.expire(now_s)
        while self._open and next(iter(self._open.values())).expires_s <= now_s:
            self._open.popitem(last=False)

    def _end_life(self, replica: str) -> None:
        self.ledger.end_life(replica)
        self.peers.end_life(replica)
        self.optimistic.forget_replica(replica)
