"""What a reader of the bus learns about replicas, in an order that can be trusted.

`FeedListener` is the narrow side that fleet and index implement: whatever happens on the wire
(loss, duplication, reordering, restarts), its methods are called so that the state built from them
is either right or known to be unknown.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from events.load import DigestShape, ReplicaHello, ReplicaLoad


class FeedListener(Protocol):
    """Called on the event loop; must not block. A larger `boot` fences everything older at once."""

    def on_hello(self, replica: str, boot: int, hello: ReplicaHello) -> None:
        """First sight of a replica's life, or its repeated hello."""

    def on_load(self, replica: str, boot: int, load: ReplicaLoad) -> None:
        """A heartbeat of the current life."""

    def on_digest_reset(
        self,
        replica: str,
        boot: int,
        generation: int,
        seq: int,
        shape: DigestShape,
        bits: np.ndarray,
    ) -> None:
        """The whole digest: `bits` is uint8 of shape (shape.bits // 8,), little bit order."""

    def on_digest_delta(
        self,
        replica: str,
        boot: int,
        seq: int,
        set_positions: np.ndarray,
        clear_positions: np.ndarray,
    ) -> None:
        """Positions (uint32) that became set or clear; always follows the state before it."""

    def on_digest_unknown(self, replica: str, boot: int, reason: str) -> None:
        """A gap: forget the replica's locality, keep routing to it by load. A reset will follow."""

    def on_gone(self, replica: str, boot: int, reason: str) -> None:
        """Bye, or silence beyond the bound, or fenced by a larger boot."""
