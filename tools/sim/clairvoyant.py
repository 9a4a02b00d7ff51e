"""The bound: a choice that knows every cache and every queue as they are at this moment.

Least time to first token, by what really waits there, what really is cached and what one of the
tiers below would bring in meanwhile. It does not know the future: what a choice evicts, and who
comes next, it can't weigh. For orientation only.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from replica.engine.messages import EngineRequest
from tools.sim.replica import SimReplica


def most_able(replicas: Sequence[SimReplica], request: EngineRequest, rng: random.Random) -> str:
    """The replica that would answer first; ties at random."""
    times = [_ttft_ms(replica, request) for replica in replicas]
    soonest = min(times)
    return rng.choice(
        [r.name for r, took_ms in zip(replicas, times, strict=True) if took_ms == soonest]
    )


def _ttft_ms(replica: SimReplica, request: EngineRequest) -> float:
    scheduler, prefill = replica.scheduler, replica.device.prefill
    block_tokens = scheduler.limits.block_tokens
    tokens = len(request.prompt)
    limit = (tokens - 1) // block_tokens
    content = array("I", request.prompt).tobytes()
    chain = list(request.chain)
    found = scheduler.cache.match(chain, content, limit)
    depth = 0 if found is None else found.depth + 1
    below = replica.tiers.reach(chain[depth:limit]) if replica.tiers is not None else []
    queue_ms = prefill.predict_ms(0, scheduler.queued_prefill_tokens()) / replica.speed

    def answered_ms(more: int, fetched_ms: float) -> float:
        cached = block_tokens * (depth + more)
        computing_ms = prefill.predict_ms(cached, tokens - cached) / replica.speed
        return max(queue_ms, fetched_ms) + computing_ms

    return min(answered_ms(*way) for way in [(0, 0.0), *below])
