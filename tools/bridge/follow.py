"""Keeping one engine's cache as its events tell it: replay, live events, gaps, restarts."""

from __future__ import annotations

import logging
from collections import Counter

from events.errors import WireError
from events.kvevents import decode_batch
from tools.bridge.cache import EngineCache
from tools.bridge.sequence import Sequence, Verdict
from tools.bridge.source import EngineGoneError, EventSource, Message

log = logging.getLogger(__name__)


class Follower:
    """One life of an engine. `counts`: gaps, those that could not be closed, malformed messages."""

    def __init__(self, source: EventSource, cache: EngineCache) -> None:
        self.counts: Counter[str] = Counter()
        self._source = source
        self._cache = cache
        self._sequence = Sequence()

    async def catch_up(self) -> None:
        """What the engine has said before we came, as far as it still knows."""
        await self._replay()

    async def follow(self) -> None:
        """For ever. Raises EngineGoneError when this life is over, or may be."""
        async for message in self._source.live():
            verdict = self._sequence.live(message[0])
            if verdict is Verdict.RESTART:
                raise EngineGoneError
            if verdict is Verdict.GAP:
                self.counts["gaps"] += 1
                await self._replay()
                verdict = self._sequence.replayed(message[0])
            if verdict is Verdict.GAP:
                self._lose()
            if verdict is not Verdict.OLD:
                self._take(message)

    async def _replay(self) -> None:
        """From behind the last message taken in; the engine may have forgotten the first ones."""
        async for message in self._source.replay(self._sequence.applied + 1):
            verdict = self._sequence.replayed(message[0])
            if verdict is Verdict.GAP:
                self._lose()
            if verdict is not Verdict.OLD:
                self._take(message)

    def _lose(self) -> None:
        """Evictions may have been missed: better to know nothing than what is wrong."""
        self.counts["lost"] += 1
        self._cache.clear()

    def _take(self, message: Message) -> None:
        number, payload = message
        self._sequence.take(number)
        try:
            self._cache.apply(decode_batch(payload))
        except WireError as error:
            self.counts["malformed"] += 1
            log.warning("a message of the engine can't be read: %s", error)
            self._lose()
