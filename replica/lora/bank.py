"""The adapters that a replica can load, and those in memory, from which the runner takes them.

What is loaded must have the digest that the replica has told of: a folder whose content changed
since is a failed load, never another adapter under the same name.

Each load has a deadline. One that is slow stops between two layers; one that hangs in the file
system can't be stopped: its thread is left alone, what it may bring later is dropped, and until it
ends its adapter isn't tried again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from threading import Lock, Thread, Timer

from configs.model.adapter import AdapterCard, AdapterFile
from configs.model.errors import ModelError
from configs.model.shape import ModelShape
from replica.lora.weights import AdapterWeights, DeltaBuilder, LoadStoppedError

log = logging.getLogger(__name__)

LOAD_S = 30.0
"""From its begin to its deadline."""

ABREAST = 2
"""Loads at once: while one waits for its disk another one goes on."""

MAX_STUCK = 4
"""Threads that are left alone; with so many nothing is loaded until one of them ends."""


class _Load:
    """One load under way, on a thread of its own that nobody waits for."""

    def __init__(self, name: str, deadline_s: float, expire: Callable[[_Load], None]) -> None:
        self.name = name
        self.stopped = False
        self.timer = Timer(deadline_s, expire, (self,))
        self.timer.daemon = True

    def begin(self, body: Callable[[_Load], None]) -> None:
        """Run it, and its clock."""
        self.timer.start()
        Thread(target=body, args=(self,), name=f"adapter {self.name}", daemon=True).start()

    def stop(self) -> None:
        """Its result is not wanted any more; idempotent."""
        self.stopped = True
        self.timer.cancel()


class AdapterBank:
    """Implements replica.engine.messages.AdapterLoader. `weights` is written on the loading threads
    and on the engine's, and read on the device's: whole entries only. `load_s`: how long the loads
    that begin from now on may take."""

    def __init__(
        self,
        cards: Mapping[str, AdapterCard],
        shape: ModelShape,
        builder: DeltaBuilder,
        load_s: float = LOAD_S,
    ) -> None:
        self.cards = cards
        self.weights: dict[str, AdapterWeights] = {}
        self._shape = shape
        self._builder = builder
        self.load_s = load_s
        self._landed: Callable[[str, bool], None] = lambda name, loaded: None
        self._lock = Lock()
        self._queue: deque[str] = deque()
        self._under_way: dict[str, _Load] = {}
        self._stuck: dict[str, _Load] = {}
        self._closed = False

    @property
    def names(self) -> frozenset[str]:
        """See AdapterLoader."""
        return frozenset(self.cards)

    @property
    def stuck(self) -> frozenset[str]:
        """Those whose load was given up, but has not ended."""
        return frozenset(self._stuck)

    def attach(self, landed: Callable[[str, bool], None]) -> None:
        """See AdapterLoader."""
        self._landed = landed

    def load(self, name: str) -> None:
        """See AdapterLoader."""
        with self._lock:
            self._queue.append(name)
        self._go_on()

    def drop(self, name: str) -> None:
        """See AdapterLoader."""
        del self.weights[name]

    def close(self) -> None:
        """See AdapterLoader; what is being loaded is not waited for."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            loads = list(self._under_way.values())
            self._under_way.clear()
        for load in loads:
            load.stop()

    def _go_on(self) -> None:
        """Begin what may begin now; tell of what can't."""
        refused = []
        with self._lock:
            while self._queue and not self._closed:
                if self._queue[0] in self._stuck or len(self._stuck) >= MAX_STUCK:
                    refused.append((self._queue.popleft(), f"{len(self._stuck)} loads hang"))
                elif len(self._under_way) < ABREAST:
                    name = self._queue.popleft()
                    try:
                        self._begin(name)
                    except RuntimeError as error:  # the machine gives no more threads
                        refused.append((name, str(error)))
                else:
                    break
        for name, why in refused:
            log.error("adapter '%s' isn't tried: %s", name, why)
            self._landed(name, False)

    def _begin(self, name: str) -> None:
        """With the lock held. Raises RuntimeError where there is no thread for it."""
        load = self._under_way[name] = _Load(name, self.load_s, self._expire)
        try:
            load.begin(self._run)
        except RuntimeError:
            load.stop()
            del self._under_way[name]
            raise

    def _run(self, load: _Load) -> None:
        try:
            weights = self._built(load)
        except LoadStoppedError:
            self._end(load, None)
        except Exception as error:
            # Whoever waits is told that it failed; the folder and the cause are the operator's.
            log.error("adapter '%s' can't be loaded: %s", load.name, error)
            self._end(load, None)
        else:
            self._end(load, weights)

    def _end(self, load: _Load, weights: AdapterWeights | None) -> None:
        """It ended by itself; whoever was told of its end already is not told again."""
        load.stop()
        with self._lock:
            if self._stuck.get(load.name) is load:
                del self._stuck[load.name]
            tells = self._under_way.get(load.name) is load
            if tells:
                del self._under_way[load.name]
                if weights is not None:
                    self.weights[load.name] = weights
        if tells:
            self._landed(load.name, weights is not None)
        self._go_on()

    def _expire(self, load: _Load) -> None:
        """Its deadline has passed."""
        load.stop()
        with self._lock:
            if self._under_way.get(load.name) is not load:
                return
            self._stuck[load.name] = self._under_way.pop(load.name)
        log.error("adapter '%s' can't be loaded: not within %g s", load.name, self.load_s)
        self._landed(load.name, False)
        self._go_on()

    def _built(self, load: _Load) -> AdapterWeights:
        card = self.cards[load.name]
        file = AdapterFile(card.path, self._shape)
        if file.digest() != card.digest:
            raise ModelError(f"{card.path} has changed since the replica started")
        return self._builder.build(load.name, file, lambda: load.stopped)
