"""The adapters that a replica can load, and those in memory, from which the runner takes them.

One thread loads, one adapter after the other: reading and laying out would only slow each other
down. What is loaded must have the digest that the replica has told of: a folder whose content
changed since is a failed load, never another adapter under the same name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from configs.model.adapter import AdapterCard, AdapterFile
from configs.model.errors import ModelError
from configs.model.shape import ModelShape
from replica.lora.weights import AdapterWeights, DeltaBuilder

log = logging.getLogger(__name__)


class AdapterBank:
    """Implements replica.engine.messages.AdapterLoader. `weights` is written on the loading thread
    and on the engine's, and read on the device's: whole entries only."""

    def __init__(
        self, cards: Mapping[str, AdapterCard], shape: ModelShape, builder: DeltaBuilder
    ) -> None:
        self.cards = cards
        self.weights: dict[str, AdapterWeights] = {}
        self._shape = shape
        self._builder = builder
        self._landed: Callable[[str, bool], None] = lambda name, loaded: None
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="adapters")

    @property
    def names(self) -> frozenset[str]:
        """See AdapterLoader."""
        return frozenset(self.cards)

    def attach(self, landed: Callable[[str, bool], None]) -> None:
        """See AdapterLoader."""
        self._landed = landed

    def load(self, name: str) -> None:
        """See AdapterLoader."""
        self._loading.submit(self._load, name)

    def drop(self, name: str) -> None:
        """See AdapterLoader."""
        del self.weights[name]

    def close(self) -> None:
        """See AdapterLoader; what is being loaded is not waited for."""
        self._loading.shutdown(wait=False, cancel_futures=True)

    def _load(self, name: str) -> None:
        try:
            self.weights[name] = self._built(name)
        except Exception as error:
            # Whoever waits is told that it failed; the folder and the cause are the operator's.
            log.error("adapter '%s' can't be loaded: %s", name, error)
            self._landed(name, False)
        else:
            self._landed(name, True)

    def _built(self, name: str) -> AdapterWeights:
        card = self.cards[name]
        file = AdapterFile(card.path, self._shape)
        if file.digest() != card.digest:
            raise ModelError(f"{card.path} has changed since the replica started")
        return self._builder.build(name, file)
