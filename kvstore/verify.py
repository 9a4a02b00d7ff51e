"""Whether stored bytes are the block that was asked for: nothing loaded is used before that.

A refusal is a Reason, never an exception: a wrong block is a miss for whoever asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstore.block import BlockHeader, decode
from kvstore.errors import BadBlockError, Reason
from kvstore.identity import BlockIdentity, block_key
from kvstore.layout import Layout
from kvstore.sums import Buffer, layer_sums
from kvstore.tier import Outcome


def wall_ms() -> int:
    """The wall clock: for the life time in headers, which outlives processes, and nothing else."""
    return time.time_ns() // 1_000_000


class Verifier:
    """For one replica: its cluster key, its memory layout, the MAC key of its shared tiers.

    Threads may share it.
    """

    def __init__(
        self, cluster_key: bytes, layout: Layout, now_ms: Callable[[], int] = wall_ms
    ) -> None:
        self._cluster_key = cluster_key
        self._layout = layout
        self._now_ms = now_ms

    def header(
        self, data: Buffer, expected: BlockIdentity, mac_key: bytes | None = None
    ) -> BlockHeader | Reason:
        """The header, once it is sure to be of the expected block in our layout.

        With a `mac_key` only headers that carry its MAC pass. The key is worked out anew from the
        header's own parent and tokens, so that a block under a foreign key is found out.
        """
        try:
            header = decode(data, mac_key)
        except BadBlockError as error:
            return error.reason
        return self._refusal(header, expected) or header

    def _refusal(self, header: BlockHeader, expected: BlockIdentity) -> Reason | None:
        found, layout = header.block, self._layout
        if found.namespace != expected.namespace or found.scope != expected.scope:
            return Reason.NAMESPACE
        if header.layout != layout.fingerprint or header.payload_bytes != layout.payload_bytes:
            return Reason.LAYOUT
        if header.layers != layout.layers:
            return Reason.LAYOUT
        if found.key != expected.key:
            return Reason.KEY
        if found.parent != expected.parent:
            return Reason.PARENT
        if found.tokens != expected.tokens:
            return Reason.TOKENS
        if found != expected:
            return Reason.INDEX
        if block_key(self._cluster_key, found.parent, found.tokens) != found.key:
            return Reason.KEY
        if header.expires_ms and header.expires_ms <= self._now_ms():
            return Reason.EXPIRED
        return None

    def payload(self, header: BlockHeader, payload: Buffer) -> Reason | None:
        """Whether these are the bytes that were written; None when they are. Call it once they lie
        in memory that nobody else can write."""
        if memoryview(payload).nbytes != header.payload_bytes:
            return Reason.SIZE
        return None if layer_sums(payload, header.layers) == header.sums else Reason.PAYLOAD

    def verdict(
        self,
        outcome: Outcome,
        expected: BlockIdentity,
        payload: Buffer,
        mac_key: bytes | None = None,
    ) -> BlockHeader | Reason:
        """Of a hit that has landed in `payload`: the header when header and payload are right."""
        header = self.header(outcome.header, expected, mac_key)
        if not isinstance(header, BlockHeader):
            return header
        if not outcome.sums:
            return self.payload(header, payload) or header
        return header if outcome.sums == header.sums else Reason.PAYLOAD
