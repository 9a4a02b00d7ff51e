"""A prompt's way from the one that computes it to the one that answers: planned, carried out once.

The job on the one that computes ends when its blocks are in the store that both reach, or can't be;
only then the request is placed. Whoever leaves meanwhile cancels it. What one fails at, or falls
silent over, another one is asked for once; whatever fails then is counted by its name, and the
request goes on as if nobody had computed anything.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection

from msgspec.structs import replace

from configs.schema import RouterConfig
from events.errors import UserError
from events.output import CoreDelta
from events.request import SamplingParams
from kvstore.identity import KEY_BYTES, KeyChain
from router.choice.choose import RouterBrain
from router.choice.route import HandOff, RouteQuery
from router.dispatch.dispatch import Dispatcher
from router.dispatch.failover import RetryBudget, Run
from router.dispatch.job import Job, Leg
from router.serving.http import log_unexpected
from router.split.pairing import SHORT, Pair, Pairing
from router.split.quota import DecodeQuota

SPLIT, FAILED, LATE, NOT_WRITTEN, LEFT = "split", "failed", "late", "not_written", "client_gone"
"""How a hand-off that was begun ended."""

NO_ANSWER = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
PATIENCE = 4.0
"""A hand-off may take so many times as long as predicted."""
LEAST_S = 2.0
MOST_OF_DEADLINE = 0.5
"""The other half is left for computing it after all."""

TRIES = 2
"""By different replicas."""

LOOK_S = 0.2
SILENT_S = 1.0
"""A link says something twice as often, whatever its replica does: where two looks in a row find it
silent for so long, nothing is waited for any more."""

SHARE_RATE = 0.1


class Splitter:
    """`totals` counts requests by what became of them, `taken_over` those that another one had to
    be asked for; `tokens` and `took_ms` are sums over those that were split, `moving_share` the
    part of their time in which blocks only moved, lately. `dispatcher` sends the jobs, unheard:
    their times are nobody's TTFT."""

    def __init__(self, brain: RouterBrain, dispatcher: Dispatcher, config: RouterConfig) -> None:
        self.totals: Counter[str] = Counter()
        self.taken_over = 0
        self.tokens = 0
        self.took_ms = 0.0
        self.running = 0
        self.moving_share = 0.0
        self.quota = DecodeQuota(brain.ledger, brain.peers, config.split_decode_share)
        self.pairing = Pairing(brain, self.quota, config.split_min_tokens)
        self._dispatcher = dispatcher
        self._budget = RetryBudget()

    def may(self, job: Job) -> bool:
        """As Splits.may says."""
        return job.pin is None and not job.scores_prompt and self.pairing.splits(job.pool)

    def begin(self, job: Job, leg: Leg, unable: frozenset[str]) -> asyncio.Task[HandOff] | HandOff:
        """As Splits.begin says. Cancelling the task stops the work at the other end."""
        if job.prompt_tokens <= self.pairing.min_tokens:
            self.totals[SHORT] += 1
            return HandOff(SHORT)
        # Planned within the task: no await lies between a plan and what is reserved for it.
        return asyncio.create_task(self._hand_off(job, job.query(leg, unable)))

    async def _hand_off(self, job: Job, query: RouteQuery) -> HandOff:
        ended = HandOff(LEFT)
        try:
            ended = await self._tried(job, query)
        finally:
            self.totals[ended.verdict] += 1
        return ended

    async def _tried(self, job: Job, query: RouteQuery) -> HandOff:
        """By one, or by another one where the first is no good."""
        began_s, ended = time.monotonic(), None
        for tries in range(TRIES):
            planned = self._plan(query)
            if not isinstance(planned, Pair) or (tries and not self._budget.withdraw()):
                break
            self.taken_over += tries > 0
            verdict, blocks = await self._carry_out(job, planned, time.monotonic() - began_s)
            took_ms = 1e3 * (time.monotonic() - began_s)
            ended = HandOff(verdict, planned.prefill, planned.store, blocks, took_ms)
            if verdict not in (FAILED, LATE):
                break
            query = _without(query, planned.prefill, took_ms)
        return ended or HandOff(str(planned))

    def _plan(self, query: RouteQuery) -> Pair | str:
        try:
            return self.pairing.plan(query)
        except Exception as error:
            log_unexpected(error)
            return FAILED

    async def _carry_out(self, job: Job, pair: Pair, spent_s: float) -> tuple[str, int]:
        """How it ended, and how many blocks are in the store then."""
        began_s = time.monotonic()
        self.running += 1
        try:
            with self.quota.pledge(pair.decode, pair.blocks):
                blocks = await self._written_blocks(job, pair, spent_s)
        except TimeoutError:
            return LATE, 0
        except UserError:
            return FAILED, 0
        except Exception as error:
            log_unexpected(error)
            return FAILED, 0
        finally:
            self.running -= 1
        if not blocks:
            return NOT_WRITTEN, 0
        self._learn(pair, blocks * job.block_tokens, 1e3 * (time.monotonic() - began_s))
        return SPLIT, blocks

    def _learn(self, pair: Pair, tokens: int, took_ms: float) -> None:
        self.tokens += tokens
        self.took_ms += took_ms
        late_ms = took_ms - pair.prefill_ms
        self.pairing.learn(pair.store, late_ms)
        share = max(0.0, late_ms + pair.fetch_ms) / max(1e-9, took_ms + pair.fetch_ms)
        self.moving_share += SHARE_RATE * (share - self.moving_share)

    async def _written_blocks(self, job: Job, pair: Pair, spent_s: float) -> int:
        """Raises UserError and TimeoutError."""
        limit_s = _limit_s(job, pair, spent_s)
        async with asyncio.timeout(limit_s):
            with Run(prefill_job(job, pair, limit_s), self._dispatcher, self._budget, 0) as run:
                last: Collection[CoreDelta] = ()
                looks_silent = 0
                while not run.done:
                    last = await run.next(LOOK_S)
                    looks_silent = looks_silent + 1 if self._silent(pair.prefill) else 0
                    if looks_silent > 1 and run.attempt is not None:
                        run.attempt.finish("timeout", replica_fault=True)
                        raise TimeoutError
        told = max((of.finish.written_blocks for of in last if of.finish is not None), default=0)
        return max(0, min(told, pair.blocks))

    def _silent(self, replica: str) -> bool:
        link = self._dispatcher.links.get(replica)
        return link is not None and link.silent_s > SILENT_S


def _without(query: RouteQuery, replica: str, took_ms: float) -> RouteQuery:
    """The same for anybody else, after so much time."""
    deadline_ms = query.ttft_deadline_ms
    left_ms = None if deadline_ms is None else max(1.0, deadline_ms - took_ms)
    return replace(query, exclude=query.exclude | {replica}, ttft_deadline_ms=left_ms)


def _limit_s(job: Job, pair: Pair, spent_s: float) -> float:
    """After which the request is better off without it. Raises TimeoutError where it is already."""
    due_s = job.first_token_timeout_s
    if job.ttft_deadline_ms is not None:
        due_s = min(due_s, max(LEAST_S, job.ttft_deadline_ms / 1e3))
    left_s = MOST_OF_DEADLINE * due_s - spent_s
    if left_s <= 0:
        raise TimeoutError
    return min(left_s, max(LEAST_S, PATIENCE * pair.prefill_ms / 1e3))


def prefill_job(job: Job, pair: Pair, limit_s: float) -> Job:
    """The leading blocks alone, pinned to the one that computes. Its id is made from the request's:
    what comes twice is fenced there."""
    return replace(
        job,
        request_id=f"{job.request_id}-prefill",
        prompt=job.prompt[: 4 * pair.blocks * job.block_tokens],
        chain=KeyChain(job.chain.data[: pair.blocks * KEY_BYTES], b""),
        public_cut_blocks=min(job.public_cut_blocks, pair.blocks),
        sampling=NO_ANSWER,
        pin=pair.prefill,
        write_to=pair.store,
        first_token_timeout_s=limit_s,
        timeout_s=limit_s,
        itl_deadline_ms=None,
    )
