"""What becomes of the KV of requests that are held for a slow reader.

To keep it costs whoever waits for blocks; to let it go costs the device what it takes to compute it
again. Both are ms here: the share of the pool that only this request uses, times the time for which
somebody waits for want of blocks; and its prefill by the learnt step times. So it is kept until it
has cost as much as computing it again, then released, its full blocks being published: at worst
twice what the best choice with hindsight costs (rent or buy: Karlin, Manasse, Rudolph and Sleator
1988). A reader that stays slow would have that again and again: whose holds have cost ABORT_FACTOR
times what its whole answer would cost anew is ended.

A place for an adapter is not shared out by the block: whoever waits for one for long gets that of
the adapter that only held requests use, as if they had been kept for as long as it pays.
"""

from __future__ import annotations

from collections import Counter

from replica.sched.lifecycle import Lifecycle
from replica.sched.refusals import slow_reader
from replica.sched.request import Request
from replica.sched.timing import Timing

REVIEW_S = 0.05
MOST_S = 1.0
"""No more is charged for the time between two reviews: the engine may have slept in between."""

ABORT_FACTOR = 3.0


class Holding:
    """Charges held requests, releases their KV, ends them. `usable_blocks`: of the pool, now."""

    def __init__(self, lifecycle: Lifecycle, timing: Timing) -> None:
        self._lifecycle = lifecycle
        self._cache = lifecycle.cache
        self._timing = timing
        self._reviewed_s = 0.0

    def review(
        self, now_s: float, usable_blocks: int, wanted: bool, places_wanted: bool = False
    ) -> None:
        """Before a plan. `wanted`: somebody waited for want of blocks when the last one was made;
        without that it costs nobody anything to keep them. `places_wanted`: somebody had waited
        for long for a place for its adapter."""
        passed_s = now_s - self._reviewed_s
        if passed_s < REVIEW_S:
            return
        self._reviewed_s = now_s
        if places_wanted:
            self._give_place()
        if not wanted:
            return
        for request in list(self._lifecycle.table.held):
            sole = self._cache.frees(request.blocks)
            if sole:
                request.rent_ms += 1e3 * min(passed_s, MOST_S) * sole / usable_blocks
                self._choose(request)

    def _give_place(self) -> None:
        """Of the adapters that nobody uses but who is held, the least recently used one's."""
        held = [each for each in self._lifecycle.table.held if each.holds_adapter]
        idle = Counter(each.adapter for each in held)
        used = self._lifecycle.adapters.references
        name = next((name for name, count in used.items() if 0 < count == idle[name]), None)
        for request in held:
            if request.adapter == name:
                request.rent_ms = self._again_ms(request)
                self._choose(request)

    def _again_ms(self, request: Request) -> float:
        return self._timing.prefill.predict_ms(0, request.committed)

    def _choose(self, request: Request) -> None:
        again_ms = self._again_ms(request)
        if request.rent_ms < again_ms:
            return
        # Had it been looked at in time it would have cost no more than this.
        cost_ms = request.held_cost_ms + again_ms
        if cost_ms + again_ms > ABORT_FACTOR * self.anew_ms(request):
            self._lifecycle.held["aborted"] += 1
            self._lifecycle.refuse(request, slow_reader())
            return
        self._lifecycle.held["released"] += 1
        request.held_cost_ms, request.rent_ms = cost_ms + again_ms, 0.0
        self._lifecycle.preempt(request)

    def anew_ms(self, request: Request) -> float:
        """What all that it was given so far would take of the device for another try."""
        decoded_ms = self._timing.decode.per_row * request.generated
        return self._timing.prefill.predict_ms(0, request.prompt_tokens) + decoded_ms
