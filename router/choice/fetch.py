"""What a replica would bring to its device rather than compute, and how long that takes.

For each run of blocks behind what the device holds: from the nearest tier that is believed to have
it, where fetching beats computing with a margin, as the replica itself will decide.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from router.choice.cost import ROW, Fetches

MARGIN = 0.7
"""As kvstore.cascade: estimates err, and a load can come late."""

_COEFFICIENTS = [ROW.index(name) for name in ("b", "c")]


def plan_fetches(
    table: np.ndarray,
    speeds: np.ndarray,
    depths: np.ndarray,
    below: Sequence[np.ndarray | None],
    prompt_tokens: int,
    block_tokens: int,
) -> Fetches:
    """`table`: the board's rows; `speeds`: float64 (rows, tiers, 2), latency and ms per block;
    `depths`: the device's; `below`: the tiers', nearest first, None for one that nobody has."""
    b, c = table[:, _COEFFICIENTS].T
    most = (prompt_tokens - 1) // block_tokens
    at = depths.astype(np.float64)
    transfer_ms = np.zeros(len(at))
    for place, tier in enumerate(below):
        if tier is None:
            continue
        count = np.minimum(tier, most) - at
        fetch_ms = speeds[:, place, 0] + count * speeds[:, place, 1]
        done, new = at * block_tokens, count * block_tokens
        compute_ms = b * new + c * (done * new + new * (new + 1) / 2)
        pays = (count > 0) & (fetch_ms <= MARGIN * compute_ms)
        at = np.where(pays, at + count, at)
        transfer_ms += np.where(pays, fetch_ms, 0.0)
    return Fetches(at.astype(np.int32), transfer_ms)
