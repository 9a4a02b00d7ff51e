"""How requests come, pause, lose their KV and go. The only place that releases blocks.

Every request that `add` takes in gets exactly one output with `finish` set, here or in a commit.
What has rows in flight, or blocks on the move, is settled when these come back.
"""

from __future__ import annotations

from collections import Counter

from events.errors import CoreError
from events.output import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH
from replica.cache.prefix import PrefixCache
from replica.engine.messages import ChildOutput
from replica.sched.adapters import Adapters
from replica.sched.lengths import OutputLengths
from replica.sched.plan import ChildId
from replica.sched.request import Request, State
from replica.sched.table import RequestTable
from replica.sched.tiers import StoredBlock, Tiers


def output_of(
    request: Request,
    finish: str | None = None,
    error: CoreError | None = None,
    written_blocks: int = 0,
) -> ChildOutput:
    """An output without tokens."""
    return ChildOutput(
        child=request.child,
        token_ids=(),
        logprobs=(),
        cached_tokens=request.cached_tokens,
        finish=finish,
        error=error,
        scheduled_s=request.scheduled_s,
        recomputed_tokens=request.recomputed_tokens,
        written_blocks=written_blocks,
    )


class Lifecycle:
    """Owns the way of every request through the states.

    `held`: what became of the KV of those that were held: "kept" until they went on, "released"
    meanwhile, or "aborted" with its request.
    """

    def __init__(
        self,
        table: RequestTable,
        cache: PrefixCache,
        lengths: OutputLengths,
        adapters: Adapters,
        tiers: Tiers | None = None,
    ) -> None:
        self.adapters = adapters
        self.table = table
        self.cache = cache
        self.lengths = lengths
        self.tiers = tiers
        self.outputs: list[ChildOutput] = []
        self.held: Counter[str] = Counter()
        self._ended: list[ChildId] = []
        self.preemptions = self.recomputed_tokens = 0

    def hold(self, child: ChildId) -> None:
        """Schedule nothing of it until `resume`; idempotent."""
        request = self.table.get(child)
        if request is None or request.over or request.on_hold:
            return
        request.on_hold = True
        if request.state not in (State.DRAINING, State.LOADING, State.WRITING):
            self.table.move(request, State.HELD)
            if not (request.blocks or request.in_flight):
                # It had a seat, but no row yet: it starts anew.
                self.adapters.release(request)

    def resume(self, child: ChildId) -> None:
        """Undo `hold`; idempotent."""
        request = self.table.get(child)
        if request is None or request.over or not request.on_hold:
            return
        request.on_hold = False
        request.held_cost_ms += request.rent_ms
        request.rent_ms = 0.0
        if request.state is State.HELD:
            self.held["kept"] += bool(request.blocks)
            started = request.blocks or request.in_flight
            self.table.move(request, State.RUNNING if started else State.QUEUED)

    def abort(self, child: ChildId, answered: bool = False) -> None:
        """End it with "abort"; unknown and ended children are ignored. `answered`: see Engine."""
        request = self.table.get(child)
        if request is not None and not request.over:
            if answered:
                self.lengths.ended(request)
            self.end(request, output_of(request, FINISH_ABORT), State.ABORTING)

    def refuse(self, request: Request, error: CoreError) -> None:
        """End it with an error."""
        if not request.over:
            self.end(request, output_of(request, FINISH_ERROR, error), State.ABORTING)

    def end(self, request: Request, output: ChildOutput, state: State = State.FINISHING) -> None:
        """Its last output is said; its blocks go as soon as nothing of it is in flight."""
        self.outputs.append(output)
        self._ended.append(request.child)
        self.table.move(request, state)
        if state is State.FINISHING:
            self.lengths.ended(request)
        if self.tiers is not None:
            self.tiers.drop(request.child)
        self.settle(request)

    def take_ended(self) -> list[ChildId]:
        """Who has ended since the last call; every plan asks."""
        ended, self._ended = self._ended, []
        return ended

    def write_out(self, request: Request, blocks: tuple[StoredBlock, ...]) -> None:
        """It is computed; its end waits until its blocks are written, as far as they can be."""
        if self.tiers is None:
            self.wrote(request, 0)
            return
        request.transfers += 1
        self.table.move(request, State.WRITING)
        self.tiers.write_out(request.child, request.spec.write_to, blocks)

    def wrote(self, request: Request, blocks: int) -> None:
        """So many of its blocks are in the store: the end of a request without an answer."""
        self.end(request, output_of(request, FINISH_LENGTH, written_blocks=blocks))

    def preempt(self, request: Request) -> None:
        """Take its KV away; it will be computed again, mostly from the cache.

        Its committed full blocks are published already: every commit does that.
        """
        self.preemptions += 1
        request.preemptions += 1
        request.suspect = False
        self.table.move(request, State.DRAINING)
        self.settle(request)

    def settle(self, request: Request) -> None:
        """Let a leaving request go on when nothing of it is in flight or under way."""
        if request.in_flight or request.transfers:
            return
        if request.state is State.DRAINING:
            request.lost_tokens = max(request.lost_tokens, request.committed)
            request.recomputed_tokens += request.committed
            self.recomputed_tokens += request.committed
            self._release(request)
            self.table.move(request, State.HELD if request.on_hold else State.QUEUED)
        elif request.state in (State.ABORTING, State.FINISHING):
            self._release(request)
            self.table.move(request, State.GONE)

    def _release(self, request: Request) -> None:
        self.cache.release(request.detach())
        self.adapters.release(request)
