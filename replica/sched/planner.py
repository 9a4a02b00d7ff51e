"""The planner: one step's rows out of one token budget.

Waiting requests are admitted first, as far as the ledger grants: what those that run need next is
part of its answer. Tokens go to decodes, then to prefill chunks, shortest first. Blocks go in
service order: whoever is visited may take them from the far end of the same order, which is never
planned yet.
"""

from __future__ import annotations

from collections import Counter

from replica.cache.prefix import Lease, PrefixCache
from replica.sched.chunks import ChunkBudget, shortest_first
from replica.sched.displace import Displacement
from replica.sched.draft import Draft
from replica.sched.ledger import Answer, Granted, Later, Ledger, Never
from replica.sched.lifecycle import Lifecycle
from replica.sched.loading import Loading
from replica.sched.order import Policy
from replica.sched.plan import ExecutionPlan, PlanId, PlanRow
from replica.sched.request import Request, State
from replica.sched.seats import Seats
from replica.sched.standing import Blocked, Standing
from replica.sched.timing import Timing
from replica.sched.victims import Victims

SCAN_REQUESTS = 64
"""How many waiting requests one step looks at, beside those that wait for an adapter."""

MAX_SCAN_REQUESTS = 1_024
"""Those included."""

ASK_AGAIN_S = 0.5
"""So long at most the first one is left alone where nothing has changed that the planner sees."""


class Planner:
    """Reads and moves requests; truth about computed tokens is the commit's alone.

    As of the last plan: `short_of_blocks`, the first that waits does so for want of blocks;
    `short_of_places`, somebody has waited for long for a place for its adapter.
    """

    def __init__(
        self,
        policy: Policy,
        ledger: Ledger,
        lifecycle: Lifecycle,
        loading: Loading,
        timing: Timing,
    ) -> None:
        self.later: Counter[str] = Counter()
        self.displaced: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.short_of_blocks = self.short_of_places = False
        self._started: list[Request] = []
        self._ledger = ledger
        self._limits = ledger.limits
        self._lifecycle = lifecycle
        self._lengths = ledger.lengths
        self._loading = loading
        self._timing = timing
        self._table = lifecycle.table
        self._cache: PrefixCache = lifecycle.cache
        self._victims = Victims(lifecycle.cache, timing)
        self._displacement = Displacement(policy, ledger, self._cache, timing, self._victims)
        self._blocked: Blocked | None = None

    def plan(self, plan_id: PlanId, now_s: float, ahead: bool = False) -> ExecutionPlan | None:
        """The next step, or None when nothing can run now. `ahead`: another one is in flight."""
        draft = Draft(ahead, self._timing.step_ms)
        if ahead and any(request.suspect for request in self._table.running):
            return None
        if self._forced(plan_id):
            if ahead:
                return None
            self._retract()
        self._serve_suspect(draft)
        if not draft.rows:
            self._admit_waiting(draft, now_s)
            self._serve_running(draft)
        if draft.starved or not draft.rows:
            return None
        for request, row in zip(draft.requests, draft.rows, strict=True):
            request.computed += len(row.token_ids)
            request.placeholders += row.sample is not None
            request.in_flight += 1
        self._cache.pool.raise_fence(plan_id)
        return ExecutionPlan(plan_id=plan_id, rows=tuple(draft.rows))

    def take_started(self) -> list[Request]:
        """Who was admitted since the last call."""
        started, self._started = self._started, []
        return started

    def _forced(self, plan_id: PlanId) -> bool:
        every = self._limits.retract_every_steps
        return bool(every) and plan_id % every == 0

    def _retract(self) -> None:
        """Somebody loses its KV, but for the first in line: something has to go on."""
        victim = self._victim(0)
        if victim is not None:
            self._lifecycle.preempt(victim)

    def _serve_suspect(self, draft: Draft) -> None:
        """After a failed plan each of its rows runs alone once, to find the culprit."""
        for place, request in enumerate(list(self._table.running)):
            if request.suspect and request.state is State.RUNNING:
                draft.quotas[request.child] = min(request.debt, self._limits.max_step_tokens)
                self._visit(request, draft, place)
                if draft.rows:
                    return

    def _serve_running(self, draft: Draft) -> None:
        running = self._table.running
        self._share_tokens(draft)
        place = 0
        while place < len(running) and not draft.starved:
            request = running[place]
            if request.child in draft.quotas:
                self._visit(request, draft, place)
            place += request.state is State.RUNNING
        if running and not (draft.rows or draft.ahead or running[0].child in draft.quotas):
            self._serve_first(running[0], draft)

    def _serve_first(self, request: Request, draft: Draft) -> None:
        """Nobody found a block, and the first in line wasn't asked: who resumes may be one more
        than there are seats. It can take from all others, who can't take from it."""
        draft.quotas[request.child] = min(request.debt, self._limits.max_step_tokens)
        self._visit(request, draft, 0)

    def _share_tokens(self, draft: Draft) -> None:
        """Decodes get theirs first, in service order; prefill chunks share the rest."""
        limits = self._limits
        seats = limits.max_running
        running = [request for request in self._table.running if request.plannable]
        decodes = [request for request in running if request.debt == 1]
        del decodes[min(seats, limits.max_step_tokens) :]
        draft.quotas.update((request.child, 1) for request in decodes)
        prefills = [request for request in running if request.debt > 1]
        if not prefills:
            return
        model = self._timing.model()
        budget = ChunkBudget(
            limits.max_step_tokens - len(decodes), limits.itl_target_ms, decodes, model
        )
        for request in shortest_first(prefills, model):
            if len(draft.quotas) < seats and (count := budget.take(request)):
                draft.quotas[request.child] = count

    def _visit(self, request: Request, draft: Draft, place: int) -> None:
        """Plan one running request; `place` is where it stands in the service order."""
        count = self._reserve(request, draft, place)
        if count:
            draft.add(request, self._row(request, count))
        elif place == 0 and not (
            draft.ahead or draft.rows or self._loading.under_way or self._cache.available
        ):
            # First in line, nothing free, nobody to take from: it holds all that there is.
            self._lifecycle.refuse(request, self._ledger.outgrown(request).error)

    def _reserve(self, request: Request, draft: Draft, place: int) -> int:
        """Get the blocks for its quota; returns how many tokens they are good for."""
        count = draft.quotas[request.child]
        missing = self._limits.blocks(request.computed + count) - len(request.blocks)
        if missing <= 0:
            return count
        if draft.ahead and missing > self._cache.available:
            draft.starved = True
            return 0
        while missing > self._cache.available:
            victim = self._victim(place)
            if victim is None:
                break
            self._lengths.retracted()
            self._lifecycle.preempt(victim)
        request.blocks += self._cache.allocate(min(missing, self._cache.available))
        room = len(request.blocks) * self._limits.block_tokens - request.computed
        return min(count, room)

    def _victim(self, place: int) -> Request | None:
        """Who gives blocks to the running request at `place`: held ones first, then the far end.

        It must free something now. Whoever computes has a block of its own, or shares it with one
        that went further; so if nobody frees anything, the candidates hold nothing of use at all.
        """
        held, behind = self._table.held, self._table.running[place + 1 :]
        return self._victims.choose(held) or self._victims.choose(behind)

    def _row(self, request: Request, count: int) -> PlanRow:
        start, end = request.computed, request.computed + count
        last = end == len(request.tokens) + request.placeholders
        return PlanRow(
            child=request.child,
            incarnation=request.incarnation,
            start=start,
            token_ids=request.next_tokens(count),
            block_ids=request.table(),
            sample=request.sample_spec(end) if last else None,
            scoring=request.scoring(start, end),
            adapter=request.adapter,
        )

    def _admit_waiting(self, draft: Draft, now_s: float) -> None:
        """Start what fits beside those that run."""
        self.short_of_blocks = self.short_of_places = False
        adapters, left = self._lifecycle.adapters.scan(now_s), SCAN_REQUESTS
        for request in self._table.waiting[:MAX_SCAN_REQUESTS]:
            if not left or draft.unloaded > self._limits.max_loads:
                return
            if request.adapter and not adapters.admits(request):
                self.later["adapter"] += 1
                self.short_of_places = adapters.starves
                continue
            found = request.expected_hit // self._limits.block_tokens
            if self._table.running and draft.finds_too_many(found):
                self.later["step"] += 1
                return
            left -= 1
            if self._follows(request, draft):
                self.later["cold_prefix"] += 1
            elif not self._try_admit(request, draft, now_s):
                return

    def _standing(self, draft: Draft) -> Standing:
        if draft.standing is None:
            seated = [*self._table.running, *self._table.loading]
            draft.standing = Standing(self._ledger.seats(seated))
        return draft.standing

    def _follows(self, request: Request, draft: Draft) -> bool:
        """Whether another one is about to have the next block which this one needs too."""
        if not self._cache.shares:
            return False
        block_tokens = self._limits.block_tokens
        found = request.expected_hit // block_tokens
        limit = request.cache_limit // block_tokens
        hit_blocks = self._standing(draft).hit_with_leader(request, found, limit)
        if hit_blocks is None:
            return False
        self._table.expect_hit(request, hit_blocks * block_tokens)
        return True

    def _try_admit(self, request: Request, draft: Draft, now_s: float) -> bool:
        """Admit it, or say no to it, or leave it; False when the queue has to wait behind it."""
        seats = self._standing(draft).seats
        blocked = self._still_blocked(request, seats, now_s)
        if blocked is not None and now_s < blocked.displaces_s:
            self.short_of_blocks = not blocked.shut
            return False
        answer, shut = self._answer(request, draft, blocked, now_s)
        if isinstance(answer, Never):
            self._lifecycle.refuse(request, answer.error)
        if not isinstance(answer, Later):
            return True
        if draft.displaced:
            return False
        if self._displace(request, draft, seats, now_s):
            return not draft.starved and self._try_admit(request, draft, now_s)
        self.later[answer.reason] += 1
        self.short_of_blocks = not shut
        self._blocked = Blocked(
            child=request.child,
            answer=answer,
            shut=shut,
            seats=len(seats),
            turns=seats.turns,
            available=self._cache.available,
            displaces_s=self._displacement.again_s(request, seats, now_s),
            until_s=now_s + ASK_AGAIN_S if blocked is None else blocked.until_s,
        )
        return False

    def _still_blocked(self, request: Request, seats: Seats, now_s: float) -> Blocked | None:
        """How it was told to wait, if nothing has changed. Where nobody runs, the held give way."""
        blocked = self._blocked
        if blocked is None or not seats.requests:
            return None
        holds = blocked.holds(request, seats, self._cache.available, now_s)
        return blocked if holds else None

    def _answer(
        self, request: Request, draft: Draft, blocked: Blocked | None, now_s: float
    ) -> tuple[Answer | None, bool]:
        """The ledger's answer (None when it lets others pass), and whether the door is shut."""
        if blocked is not None:
            return blocked.answer, blocked.shut
        answer = self._ledger.door(request, self._standing(draft).seats)
        if isinstance(answer, Granted):
            return self._start_if_room(request, draft, now_s), False
        return answer, True

    def _start_if_room(self, request: Request, draft: Draft, now_s: float) -> Answer | None:
        """The ledger's answer to its blocks; None when it lets others pass."""
        limit = request.cache_limit // self._limits.block_tokens
        keys, tokens = request.keys, request.tokens.tobytes()
        with self._cache.lookup(keys, tokens, limit, request.found) as lease:
            request.found = lease.nodes[-1] if lease.nodes else None
            self._table.expect_hit(request, len(lease) * self._limits.block_tokens)
            if self._lets_pass(request, draft, len(lease)):
                return None
            answer = self._ask(request, draft, len(lease))
            if isinstance(answer, Granted):
                self._start(request, lease, now_s)
                self._standing(draft).add(request)
                draft.found_blocks += len(lease)
        return answer

    def _lets_pass(self, request: Request, draft: Draft, hit_blocks: int) -> bool:
        """Whether it waits for a prefix that another one computes, or for room to load its own
        while others compute; nobody waits behind it for that."""
        if self._follows(request, draft):
            self.later["cold_prefix"] += 1
            return True
        if not self._table.running or not self._loading.waits(request, hit_blocks):
            return False
        self.later["transfers"] += 1
        draft.unloaded += 1
        return True

    def _ask(self, request: Request, draft: Draft, hit_blocks: int) -> Answer:
        """The ledger's answer, after the held requests gave way if only they are in the way."""
        seats = self._standing(draft).seats
        while True:
            answer = self._ledger.room(request, hit_blocks, seats, self._cache.available)
            if not isinstance(answer, Later) or seats.requests or draft.ahead:
                return answer
            victim = self._victim(0)
            if victim is None:
                return answer
            self._lifecycle.preempt(victim)

    def _displace(self, request: Request, draft: Draft, seats: Seats, now_s: float) -> bool:
        """Whether others made room for it; while a plan is in flight, whether they will."""
        chosen = self._displacement.choose(request, self._table, seats, now_s)
        if chosen.requests and draft.ahead:
            draft.starved = True
            return True
        draft.displaced = bool(chosen.requests)
        for victim in chosen.requests:
            self.displaced[chosen.reason] += 1
            self._lifecycle.preempt(victim)
            draft.standing = None
        return bool(chosen.requests)

    def _start(self, request: Request, lease: Lease, now_s: float) -> None:
        hit_tokens = len(lease) * self._limits.block_tokens
        spec = request.spec
        self._cache.limit(spec.tenant, spec.warm_share)
        taken = lease.take(spec.tenant, again=request.preemptions > 0)
        request.attach(*taken, self._limits.block_tokens)
        self._lifecycle.adapters.acquire(request)
        if not request.scheduled_s:
            request.scheduled_s = now_s
            self.prompt_tokens += request.prompt_tokens
        self.credit(request, hit_tokens)
        self._started.append(request)
        if not self._loading.begin(request):
            self._table.move(request, State.RUNNING)

    def credit(self, request: Request, tokens: int) -> None:
        """The last `tokens` tokens of what it has computed now came from a cache, on the device or
        below it. What it had lost by a preemption is found again; what it never had is a hit."""
        end, lost = request.committed, request.lost_tokens
        start = end - tokens
        found = max(0, min(end, lost) - start)
        request.recomputed_tokens -= found
        self._lifecycle.recomputed_tokens -= found
        # Of a request that goes on from elsewhere the whole prompt may lie in the cache.
        hit = max(0, min(end, request.prompt_tokens - 1) - max(start, lost))
        request.cached_tokens += hit
        self.cached_tokens += hit
