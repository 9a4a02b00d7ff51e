"""Which heads of prompts are hot: shared by many of the latest requests.

Watched are the depths at which prompts were seen to part from what was held somewhere, so that the
shared head is found, not each whole prompt. Counts halve with time; of the rest only the heaviest
are kept. The token ids of the hottest few stay in memory, bounded in bytes, so that they can be
computed elsewhere. They are shown to nobody.

A policy's own heat (policies/heat.py) judges one choice by the last requests, and knows no clock.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from msgspec import Struct

from events.decision import RouteDecision
from kvstore.identity import KEY_BYTES, KeyChain
from router.dispatch.job import Job
from router.telemetry.alarms import Clock

HALF_LIFE_S = 30.0
MIN_REQUESTS = 4
"""So many of the latest requests make a head hot, those of a hot longer head not counted."""

MIN_HEAD_TOKENS = 128
"""A shorter one is computed along with other prompts at next to no cost."""

MAX_HEADS = 32
HEADS_BYTES = 8 * 1024 * 1024
MAX_SPOTS = 1_024
MAX_DEPTHS = 256
WATCHED_DEPTHS = 32
SAMPLE_REQUESTS = 128
SAMPLE_BYTES = 16 * 1024 * 1024
MAX_GROWTH = 2.0**40


@dataclass(frozen=True, slots=True)
class HotHead:
    """`key` names its last block; `chain` has the keys of all its blocks in the namespace of
    `pool` and `adapter`; `prompt` its ids (u32 little endian). `tenant` was the last one to send
    it. `share` is of all requests."""

    number: int
    tenant: str
    pool: str
    block_tokens: int
    chain: KeyChain
    prompt: bytes = field(repr=False)
    requests_per_s: float = 0.0
    forced_off_per_s: float = 0.0
    share: float = 0.0
    adapter: tuple[str, str] | None = None

    @property
    def key(self) -> bytes:
        """Equal for no other head."""
        return self.chain[self.blocks - 1]

    @property
    def blocks(self) -> int:
        """Whole blocks only."""
        return len(self.chain)

    @property
    def tokens(self) -> int:
        """Length."""
        return self.blocks * self.block_tokens


class _Seen(Struct, frozen=True):
    """One request: where it parted from what is held somewhere, and from what its replica held."""

    job: Job
    shared_blocks: int
    held_blocks: int


@dataclass(slots=True)
class _Spot:
    """A watched place: counts in units of `HeadHeat._unit`."""

    depth: int
    parent: bytes | None = None
    weight: float = 0.0
    forced: float = 0.0


class HeadHeat:
    """`note` is cheap and samples; `settle` does the work, a few times a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rng = random.Random()
        self._epoch_s = clock()
        self._unit = 1.0
        self._total = 0.0
        self._came = 0
        self._sample: list[_Seen] = []
        self._sample_bytes = 0
        self._spots: dict[bytes, _Spot] = {}
        self._depths: defaultdict[int, float] = defaultdict(float)
        self._watched: frozenset[int] = frozenset()
        self._heads: dict[bytes, HotHead] = {}
        self._numbers = itertools.count(1)

    @property
    def heads(self) -> list[HotHead]:
        """As of the last `settle`, hottest first."""
        return list(self._heads.values())

    @property
    def head_bytes(self) -> int:
        """What their ids take."""
        return sum(len(head.prompt) for head in self._heads.values())

    def note(self, job: Job, decision: RouteDecision) -> None:
        """A request was placed. Retries and what was pinned tell nothing about the traffic."""
        if job.pin is not None or decision.attempt > 1 or not job.chain.data:
            return
        self._came += 1
        place = len(self._sample)
        if place == SAMPLE_REQUESTS or self._sample_bytes >= SAMPLE_BYTES:
            place = self._rng.randrange(self._came)
            if place >= len(self._sample):
                return
        shared = decision.shared_blocks
        cached = decision.predicted_cached_tokens // job.block_tokens
        self._put(place, _Seen(job, shared, cached if decision.forced_off else shared))

    def settle(self) -> list[HotHead]:
        """Count what came since the last time; the hottest heads, hottest first."""
        self._age()
        weight = self._unit * self._came / max(1, len(self._sample))
        self._total += self._unit * self._came
        through: dict[bytes, Job] = {}
        for seen in self._sample:
            through.update(dict.fromkeys(self._count(seen, weight), seen.job))
        self._came, self._sample, self._sample_bytes = 0, [], 0
        self._shrink()
        self._keep(self._hottest(), through)
        return self.heads

    def _put(self, place: int, seen: _Seen) -> None:
        """Behind the sample, or instead of one in it: each request is as likely to be there."""
        for old in self._sample[place : place + 1]:
            self._sample_bytes -= len(old.job.prompt)
        self._sample[place : place + 1] = [seen]
        self._sample_bytes += len(seen.job.prompt)

    def relieve(self, head: HotHead) -> None:
        """Something was done about those that were forced off it."""
        if head.key in self._spots:
            self._spots[head.key].forced = 0.0

    def _age(self) -> None:
        """Newer counts weigh more, rather than all older ones less."""
        self._unit = 2.0 ** ((self._clock() - self._epoch_s) / HALF_LIFE_S)
        if self._unit < MAX_GROWTH:
            return
        for spot in self._spots.values():
            spot.weight /= self._unit
            spot.forced /= self._unit
        for depth in self._depths:
            self._depths[depth] /= self._unit
        self._total /= self._unit
        self._epoch_s, self._unit = self._clock(), 1.0

    def _count(self, seen: _Seen, weight: float) -> Iterable[bytes]:
        """The places that it went through."""
        job, data = seen.job, seen.job.chain.data
        own = {seen.shared_blocks, job.public_cut_blocks} - {0}
        parent: bytes | None = None
        for depth in sorted(self._watched | own):
            key = data[(depth - 1) * KEY_BYTES : depth * KEY_BYTES]
            spot = self._spots.get(key)
            if spot is None:
                if depth not in own or depth * job.block_tokens < MIN_HEAD_TOKENS:
                    continue
                spot = self._spots[key] = _Spot(depth)
            spot.weight += weight
            if seen.held_blocks < depth <= seen.shared_blocks:
                spot.forced += weight
            spot.parent, parent = parent, key
            yield key
        for depth in own:
            self._depths[depth] += weight

    def _shrink(self) -> None:
        if len(self._spots) > 2 * MAX_SPOTS:
            spots = self._spots.items()
            self._spots = dict(heapq.nlargest(MAX_SPOTS, spots, key=lambda item: item[1].weight))
        if len(self._depths) > 2 * MAX_DEPTHS:
            heaviest = heapq.nlargest(MAX_DEPTHS, self._depths.items(), key=lambda item: item[1])
            self._depths = defaultdict(float, heaviest)
        depths = self._depths.__getitem__
        self._watched = frozenset(heapq.nlargest(WATCHED_DEPTHS, self._depths, key=depths))

    def _hottest(self) -> list[tuple[bytes, _Spot]]:
        """Hierarchical heavy hitters: what a longer hot head brings is not counted again for the
        shorter one in it."""
        least = MIN_REQUESTS * self._unit
        warm = [item for item in self._spots.items() if item[1].weight >= least]
        claimed: defaultdict[bytes | None, float] = defaultdict(float)
        hot = []
        for key, spot in sorted(warm, key=lambda item: -item[1].depth):
            is_hot = spot.weight - claimed[key] >= least
            if is_hot:
                hot.append((key, spot))
            claimed[spot.parent] += spot.weight if is_hot else claimed[key]
        return heapq.nlargest(MAX_HEADS, hot, key=lambda item: item[1].weight * item[1].depth)

    def _keep(self, hot: list[tuple[bytes, _Spot]], through: Mapping[bytes, Job]) -> None:
        room_bytes, kept = HEADS_BYTES, {}
        for key, spot in hot:
            head = self._known(key, spot, through.get(key))
            if head is None or len(head.prompt) > room_bytes:
                continue
            room_bytes -= len(head.prompt)
            per_s = math.log(2) / HALF_LIFE_S / self._unit
            kept[key] = replace(
                head,
                requests_per_s=spot.weight * per_s,
                forced_off_per_s=spot.forced * per_s,
                share=min(1.0, spot.weight / self._total),
            )
        self._heads = kept

    def _known(self, key: bytes, spot: _Spot, job: Job | None) -> HotHead | None:
        """The head as kept, or cut out of a prompt that just went through it."""
        head = self._heads.get(key)
        if job is None:
            return head
        if head is not None:
            return replace(head, tenant=job.tenant)
        end = spot.depth
        return HotHead(
            number=next(self._numbers),
            tenant=job.tenant,
            pool=job.pool,
            block_tokens=job.block_tokens,
            chain=KeyChain(job.chain.data[: end * KEY_BYTES], key),
            prompt=job.prompt[: end * job.block_tokens * 4],
            adapter=job.adapter,
        )
