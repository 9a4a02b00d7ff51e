"""What a router says to whoever decides on the number of replicas. Rates and counts only."""

from __future__ import annotations

import msgspec


class ScaleSignal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Said every few seconds; rates halve in half a minute once their cause is gone.

    `forced_off_per_s`: choices that had to leave the replica that was warm for them, because too
    much was waiting there. Such a request computes its prompt once more: the fleet is short of
    room where its prefixes are warm. `replicas` that take requests; what waits on them.

    Where replicas have roles: how much those that compute prompts, those that answer and the way
    between them have to do, as shares of what they can.
    """

    replicas: int
    decisions_per_s: float
    forced_off_per_s: float
    waiting: int
    queued_prefill_tokens: int
    wall_time_ms: int
    prefill_pressure: float = 0.0
    decode_pressure: float = 0.0
    transfer_pressure: float = 0.0
