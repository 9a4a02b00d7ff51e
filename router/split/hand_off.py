"""A prompt's way from the one that computes it to the one that answers: planned, carried out once.

The job on the one that computes ends when its blocks are in the store that both reach, or can't be;
only then the request is placed. Whoever leaves meanwhile cancels it. Whatever fails is counted by
its name, and the request goes on as if nobody had computed anything.
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
from router.dispatch.dispatch import Dispatcher, Job, Leg
from router.dispatch.failover import RetryBudget, Run
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

IDLE_S = 86_400.0
SHARE_RATE = 0.1


class Splitter:
    """`totals` counts requests by what became of them; `tokens` and `took_ms` are sums over those
    that were split, `moving_share` the part of their time in which blocks only moved, lately.
    `dispatcher` sends the jobs, unheard: their times are nobody's TTFT."""

    def __init__(self, brain: RouterBrain, dispatcher: Dispatcher, config: RouterConfig) -> None:
        self.totals: Counter[str] = Counter()
        self.tokens = 0
        self.took_ms = 0.0
        self.running = 0
        self.moving_share = 0.0
        self.quota = DecodeQuota(brain.ledger, config.split_decode_share)
        self.pairing = Pairing(brain, self.quota, config.split_min_tokens)
        self._dispatcher = dispatcher
        self._budget = RetryBudget()

    def may(self, job: Job) -> bool:
        """As Splits.may says."""
        return job.pin is None and self.pairing.splits(job.pool)

    def begin(self, job: Job, leg: Leg, unable: frozenset[str]) -> asyncio.Task[HandOff] | HandOff:
        """As Splits.begin says. Cancelling the task stops the work at the other end."""
        if job.prompt_tokens <= self.pairing.min_tokens:
            self.totals[SHORT] += 1
            return HandOff(SHORT)
        # Planned within the task: no await lies between a plan and what is reserved for it.
        return asyncio.create_task(self._hand_off(job, job.query(leg, unable)))

    async def _hand_off(self, job: Job, query: RouteQuery) -> HandOff:
        try:
            planned = self.pairing.plan(query)
        except Exception as error:
            log_unexpected(error)
            planned = FAILED
        if isinstance(planned, Pair):
            return await self._carry_out(job, planned)
        self.totals[planned] += 1
        return HandOff(planned)

    async def _carry_out(self, job: Job, pair: Pair) -> HandOff:
        began_s, verdict, blocks = time.monotonic(), LEFT, 0
        self.running += 1
        try:
            with self.quota.pledge(pair.decode, pair.blocks):
                blocks = await self._written_blocks(job, pair)
            verdict = SPLIT if blocks else NOT_WRITTEN
        except TimeoutError:
            verdict = LATE
        except UserError:
            verdict = FAILED
        except Exception as error:
            log_unexpected(error)
            verdict = FAILED
        finally:
            self.running -= 1
            self.totals[verdict] += 1
        took_ms = 1e3 * (time.monotonic() - began_s)
        if verdict == SPLIT:
            self.tokens += blocks * job.block_tokens
            self.took_ms += took_ms
            late_ms = took_ms - pair.prefill_ms
            self.pairing.learn(pair.store, late_ms)
            share = max(0.0, late_ms + pair.fetch_ms) / max(1e-9, took_ms + pair.fetch_ms)
            self.moving_share += SHARE_RATE * (share - self.moving_share)
        return HandOff(verdict, pair.prefill, pair.store, blocks, took_ms)

    async def _written_blocks(self, job: Job, pair: Pair) -> int:
        """Raises UserError and TimeoutError."""
        limit_s = _limit_s(job, pair)
        async with asyncio.timeout(limit_s):
            with Run(prefill_job(job, pair, limit_s), self._dispatcher, self._budget, 0) as run:
                last: Collection[CoreDelta] = ()
                while not run.done:
                    last = await run.next(IDLE_S)
        told = max((of.finish.written_blocks for of in last if of.finish is not None), default=0)
        return max(0, min(told, pair.blocks))


def _limit_s(job: Job, pair: Pair) -> float:
    """After which the request is better off without it."""
    due_s = job.first_token_timeout_s
    if job.ttft_deadline_ms is not None:
        due_s = min(due_s, max(LEAST_S, job.ttft_deadline_ms / 1e3))
    return min(MOST_OF_DEADLINE * due_s, max(LEAST_S, PATIENCE * pair.prefill_ms / 1e3))


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
