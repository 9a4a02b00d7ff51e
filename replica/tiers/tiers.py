"""What the scheduler sees of the tiers: loading in, writing out, one object for the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from events.cache import CacheFact
from events.load import FetchFit, PrefillFit
from kvstore.cascade import Cascade
from kvstore.level import Level
from kvstore.peer.client import PeerTier
from kvstore.tier import Tier
from replica.sched.plan import ChildId
from replica.sched.tiers import StoredBlock, Wanted
from replica.tiers.loader import Loader
from replica.tiers.outbound import Outbound
from replica.tiers.spotcheck import SpotCheck

OUT_OF_REACH = FetchFit(latency=1e9, per_block=1e9)


class ReplicaTiers:
    """Implements `replica.sched.tiers.Tiers`. The engine attaches itself, then starts it."""

    def __init__(
        self,
        cascade: Cascade,
        loader: Loader,
        outbound: Outbound,
        spot: SpotCheck,
        shown: Sequence[tuple[str, Level]],
        peers: Sequence[tuple[Tier, Level]] = (),
    ) -> None:
        """`shown`: the levels that readers are told of, by the names of their stores; `peers`: what
        they hold is shown by others."""
        self.names = tuple(name for name, _ in shown)
        self._shown = [level for _, level in shown]
        self._peers = [level for _, level in peers]
        self._reached = [tier for tier, _ in peers if isinstance(tier, PeerTier)]
        self._named = {name: level for name, level in shown if name}
        self.cascade = cascade
        self.loader = loader
        self.outbound = outbound
        self.spot = spot
        self._resting = False

    def attach(
        self,
        landed: Callable[[ChildId, int], None],
        prefill: Callable[[], PrefillFit],
        generation: Callable[[int], int],
        written: Callable[[ChildId, int], None],
    ) -> None:
        """`landed` and `written` take terminal events from any thread; `prefill` and `generation`
        are the engine's speed and the pool's block generations, read on any thread."""
        self.loader.landed = landed
        self.loader.prefill = prefill
        self.outbound.generation = generation
        self.outbound.written = written

    def start(self) -> None:
        """Start the helper threads."""
        self.loader.start()
        self.outbound.start()

    def drain_facts(self) -> list[list[CacheFact]]:
        """What each shown level confirmed or denied since the last call."""
        return [level.facts() for level in self._shown]

    def fetch_fits(self) -> tuple[FetchFit, ...]:
        """How fast each shown level gives blocks, then each peer; out of reach when it can't be
        used now."""
        return tuple(
            FetchFit(level.speed.latency_ms, level.fetch_ms(1) - level.speed.latency_ms)
            if level.usable
            else OUT_OF_REACH
            for level in (*self._shown, *self._peers)
        )

    def peer_names(self) -> tuple[str, ...]:
        """What routers call the stores of the peers, empty while that is not known; such are looked
        for."""
        for tier in self._reached:
            tier.meet()
        return tuple(tier.store for tier in self._reached)

    def look(self, wanted: Wanted) -> None:
        """See Tiers.look."""
        if not self._resting:
            self.loader.look(wanted)

    def worth(self, wanted: Wanted) -> bool:
        """See Tiers.worth."""
        return not self._resting and self.loader.worth(wanted)

    def land(self, wanted: Wanted, blocks: tuple[int, ...]) -> None:
        """See Tiers.land."""
        self.loader.land(wanted, blocks)

    def drop(self, child: ChildId) -> None:
        """See Tiers.drop."""
        self.loader.drop(child)
        self.outbound.drop(child)

    def stored(self, block: StoredBlock) -> None:
        """See Tiers.stored."""
        if not self._resting:
            self.outbound.stored(block)

    def used(self, keys: tuple[bytes, ...]) -> None:
        """See Tiers.used."""
        if not self._resting:
            self.outbound.used(keys)

    def write_out(self, child: ChildId, store: str, blocks: tuple[StoredBlock, ...]) -> None:
        """See Tiers.write_out. Nothing is written to a store that isn't ours."""
        level = None if self._resting else self._named.get(store)
        if level is None:
            self.outbound.written(child, 0)
        else:
            self.outbound.write_out(child, level, blocks)

    def clear(self) -> None:
        """Delete what is ours in each shown level, and forget what waits to be written."""
        self.outbound.forget()
        for level in self._shown:
            level.clear()

    def rest(self, resting: bool) -> None:
        """While they rest nothing is read or written: the device stands alone."""
        self._resting = resting

    def close(self) -> None:
        """End every load and forget what waits; the device is not touched when this returns."""
        self.loader.close()
        self.outbound.close()
        for level in self.cascade.levels:
            level.tier.close()
