"""Which LoRA adapters are in memory, who computes with them, and who has to wait for one.

A request that holds KV holds a reference to its adapter, from its admission until its blocks go: so
no row in flight lacks its adapter, and at most `max_adapters_per_batch` are in use at once. Loads
run elsewhere; whoever waits for one holds up nobody. What nobody uses leaves, least recently used
first, when another one is wanted. Knows names alone: what an adapter is, is its loader's business.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection

from events.errors import InvariantError
from replica.engine.messages import AdapterLoader, AdapterState
from replica.sched.ledger import Granted, Ledger
from replica.sched.request import Request

PATIENCE_S = 1.0
"""Whoever has waited so long for a place goes before those behind it, however well they would fit:
without that, a steady stream to the adapters in use would keep it out for ever."""

AVOIDED_S = 5.0
MAX_AVOIDED_S = 60.0
"""How long others are asked to stay away after a failed load; twice as long after each further one,
up to the most."""


class Adapters:
    """Residency by name. One thread uses it."""

    def __init__(
        self,
        ledger: Ledger,
        loader: AdapterLoader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a `loader` there are none."""
        self._ledger = ledger
        self._names = frozenset() if loader is None else loader.names
        self._loader = loader
        self._clock = clock
        self._references: OrderedDict[str, int] = OrderedDict()
        self._loading: dict[str, float] = {}
        self._load_ms: dict[str, float] = {}
        self._avoided_s: dict[str, float] = {}
        self._avoided_until_s: dict[str, float] = {}
        self._loads = self._failures = self._evictions = 0

    def knows(self, name: str) -> bool:
        """Whether there is such an adapter."""
        return name in self._names

    @property
    def references(self) -> dict[str, int]:
        """How many requests use each of those in memory, least recently used first."""
        return dict(self._references)

    @property
    def loading(self) -> frozenset[str]:
        """Those under way."""
        return frozenset(self._loading)

    def state(self) -> AdapterState:
        """A snapshot."""
        return AdapterState(
            resident=tuple(self._references),
            in_use=self._in_use(),
            loading=len(self._loading),
            loads=self._loads,
            failures=self._failures,
            evictions=self._evictions,
            load_ms=dict(self._load_ms),
            avoided_until_s=dict(self._avoided_until_s),
        )

    def scan(self, now_s: float) -> Scan:
        """The waiting requests are about to be looked at, in service order."""
        return Scan(self, now_s)

    def fits(self, name: str) -> bool:
        """Whether it may be in use beside those that are."""
        used = self._references.get(name, 0) > 0
        return isinstance(self._ledger.adapter(self._in_use(), used), Granted)

    def ready(self, name: str, wanted: Collection[str]) -> bool:
        """Whether it is in memory; has it loaded where there is room. For that others leave, but
        nobody of `wanted`: who waits for those is served before."""
        if name in self._references:
            self._references.move_to_end(name)
            return True
        if name not in self._loading and self._make_room(wanted):
            self._begin(name)
        return False

    def acquire(self, request: Request) -> None:
        """The request starts to compute with its adapter. Raises InvariantError where that is not
        in memory."""
        if not request.adapter:
            return
        if request.adapter not in self._references or request.holds_adapter:
            raise InvariantError(f"adapter '{request.adapter}' can't be used now")
        self._references[request.adapter] += 1
        request.holds_adapter = True
        request.adapter_since_s = 0.0

    def release(self, request: Request) -> None:
        """It computes no more; idempotent."""
        if request.holds_adapter:
            request.holds_adapter = False
            self._references[request.adapter] -= 1

    def landed(self, name: str, loaded: bool) -> None:
        """The one terminal event of a load. Raises InvariantError when none was under way."""
        if name not in self._loading:
            raise InvariantError(f"no load of adapter '{name}' is under way")
        began_s = self._loading.pop(name)
        if loaded:
            self._references[name] = 0
            self._load_ms[name] = 1e3 * (self._clock() - began_s)
            self._avoided_s.pop(name, None)
            self._avoided_until_s.pop(name, None)
        else:
            self._failures += 1
            self._avoid(name)

    def _avoid(self, name: str) -> None:
        """Whoever comes all the same has it tried again."""
        avoided_s = min(2 * self._avoided_s.get(name, AVOIDED_S / 2), MAX_AVOIDED_S)
        self._avoided_s[name] = avoided_s
        self._avoided_until_s[name] = self._clock() + avoided_s

    def _in_use(self) -> int:
        return sum(count > 0 for count in self._references.values())

    def _begin(self, name: str) -> None:
        if self._loader is None:
            raise InvariantError("there is nothing to load adapters with")
        self._loads += 1
        self._loading[name] = self._clock()
        self._loader.load(name)

    def _make_room(self, wanted: Collection[str]) -> bool:
        """Whether one more may be in memory, after somebody left if need be."""
        if len(self._references) + len(self._loading) < self._ledger.limits.max_adapters:
            return True
        for name, count in self._references.items():
            if not count and name not in wanted:
                del self._references[name]
                self._evictions += 1
                if self._loader is not None:
                    self._loader.drop(name)
                return True
        return False


class Scan:
    """One look at the waiting requests: who of those that have an adapter may be admitted."""

    def __init__(self, adapters: Adapters, now_s: float) -> None:
        self._adapters = adapters
        self._now_s = now_s
        self._wanted: set[str] = set()
        self._starved = ""

    @property
    def starves(self) -> bool:
        """Whether somebody has waited for a place for long."""
        return bool(self._starved)

    def admits(self, request: Request) -> bool:
        """Whether its adapter is in memory and has a place; asked in service order."""
        name = request.adapter
        self._wanted.add(name)
        ready = self._adapters.ready(name, self._wanted)
        if self._starved not in ("", name) or name in self._adapters.loading:
            return False
        if ready and self._adapters.fits(name):
            return True
        if not request.adapter_since_s:
            request.adapter_since_s = self._now_s
        elif self._now_s - request.adapter_since_s >= PATIENCE_S:
            self._starved = name
        return False
