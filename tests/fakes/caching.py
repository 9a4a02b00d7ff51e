"""A fake replica with a prefix cache: it finds by block keys, counts what it computes, and tells
its digest. Never evicts."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np

from events.digest import positions
from events.feed import FeedListener
from events.load import AdapterNote, ReplicaHello, ReplicaLoad
from events.request import CoreRequest
from kvstore.identity import KeyChain, Namespace, chain
from tests.fakes.replica import DIGEST, FakeReplica
from tests.fakes.scripts import Call


class CachingReplica(FakeReplica):
    """`queued_tokens`: what its heartbeats say that waits there. While `gate` is not set, nothing
    is answered."""

    def __init__(
        self,
        replica_id: str,
        *,
        cluster_key: bytes,
        adapters: tuple[AdapterNote, ...] = (),
        **settings: Any,
    ) -> None:
        super().__init__(replica_id, cluster_key=cluster_key, script=self._serve, **settings)
        self.adapters = adapters
        self.held: set[bytes] = set()
        self.computed_tokens = 0
        self.queued_tokens = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._cluster_key = cluster_key
        self._listener: FeedListener | None = None
        self._seq = 0

    def announce(self, listener: FeedListener, every_s: float = 0.05) -> None:
        self._listener = listener
        super().announce(listener, every_s)

    def hello(self) -> ReplicaHello:
        return msgspec.structs.replace(super().hello(), adapters=self.adapters)

    def load(self) -> ReplicaLoad:
        return msgspec.structs.replace(
            super().load(),
            digest_seq=self._seq,
            waiting=int(self.queued_tokens > 0),
            queued_prefill_tokens=self.queued_tokens,
        )

    def keys(self, request: CoreRequest) -> KeyChain:
        """As a real replica names the blocks of this request."""
        return chain(
            self._cluster_key,
            Namespace.of_hello(self.hello()).adapted(request.adapter),
            request.salt,
            request.prompt,
            request.public_cut_blocks,
        )

    async def _serve(self, call: Call) -> None:
        waits = [asyncio.ensure_future(e.wait()) for e in (self.gate, call.aborted)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if call.aborted.is_set():
            return
        cached = min(self._cached_blocks(call.request) * 16, call.prompt_tokens - 1)
        self.computed_tokens += call.prompt_tokens - cached
        self._keep(self.keys(call.request))
        await call.answer(cached=cached)

    def _cached_blocks(self, request: CoreRequest) -> int:
        found = 0
        for key in self.keys(request):
            if key not in self.held:
                break
            found += 1
        return found

    def _keep(self, keys: KeyChain) -> None:
        self.held.update(keys)
        if self._listener is not None and len(keys):
            self._seq += 1
            spots = positions(keys.halves(), DIGEST).ravel().astype(np.uint32)
            none = np.empty(0, np.uint32)
            self._listener.on_digest_delta(self.replica_id, self.boot, self._seq, spots, none)
