"""What a choice is priced from and what the pricing says of each replica, as rows of numbers, and
the two sides' words for them: which is whose column.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple, Protocol

import numpy as np
from msgspec import Struct

from configs.native import address
from router.choice.reserve import SIZES
from router.fleet.member import SUSPECT_LOAD_AGE_S

MIN_MATCH_TOKENS = 32
"""A shorter match is not worth following, and may be a digest's false positive."""

ROW = (
    "context_limit", "total_blocks", "barred", "admits_from_s", "load_at_s", "digest_at_s",
    "unknown", "trust", "a", "b", "c", "base", "per_row", "per_context", "step_tokens",
    "max_running", "failures", "unreported", "backlog_ms", "cached_blocks", "prompts_seen",
    "prompts_cached", "busy",
    "requests", "rows", "context_tokens", "unseen_prefill_ms", "queued_tokens", "free_blocks",
    *(f"prefills_{size}_ms" for size in range(SIZES)),
)  # fmt: skip
"""What a row of the table says of one replica; router/fleet/board.py fills it. From `requests` on
it changes with every reservation."""

TERMS = (
    "score", "saved_prefill_ms", "queue_ms", "prefill_ms", "transfer_ms", "decode_share_ms",
    "harm_ms", "eviction_ms", "overload_ms", "lateness_ms", "ttft_ms", "overlap_blocks",
    "cached_tokens", "new_blocks", "usable_tokens",
)  # fmt: skip
"""What a row of the answer says of one candidate."""

BEST = 16
"""Candidates whose places are found along with the prices."""

FIT, NOT_ASKED, TOO_LONG, BARRED, BREAKER, UNHEARD = range(6)
"""Why a replica is no candidate."""

_ASK = struct.Struct("7d")


class Demand(Struct, frozen=True):
    """What the request asks of any replica; the deadline in ms from now."""

    prompt_tokens: int
    output_tokens: float
    block_tokens: int
    ttft_deadline_ms: float | None

    def numbers(self, now_s: float) -> bytes:
        """As the kernel reads them."""
        deadline_ms = math.inf if self.ttft_deadline_ms is None else self.ttft_deadline_ms
        return _ASK.pack(
            now_s,
            self.prompt_tokens,
            self.output_tokens,
            self.block_tokens,
            deadline_ms,
            SUSPECT_LOAD_AGE_S,
            MIN_MATCH_TOKENS,
        )


class Sheet:
    """One pool's numbers: what is known of each replica, `table` (float64 (replicas, len(ROW))),
    `everybody` (uint8 (replicas,), all 1), and room for one answer, which the next choice takes
    again."""

    __slots__ = ("at", "best", "everybody", "everybody_at", "figures", "state", "table", "terms")

    def __init__(self, replicas: int) -> None:
        self.table = np.zeros((replicas, len(ROW)))
        self.everybody = np.ones(replicas, np.uint8)
        self.state = np.empty(replicas, np.uint8)
        self.terms = np.empty((replicas, len(TERMS)))
        self.best = np.empty(BEST, np.int64)
        self.figures = np.empty(3 + BEST)
        arrays = (self.table, self.state, self.terms, self.best, self.figures)
        self.at = tuple(map(address, arrays))
        self.everybody_at = address(self.everybody)


class Figures(Struct, frozen=True):
    """Over all candidates: the shortest TTFT, the shortest queue, the most leading blocks held, and
    the `BEST` best scores, best first. Nothing is known of nobody."""

    soonest_ms: float
    least_queued_tokens: float
    longest_blocks: int
    best_scores: list[float]


NOBODY = Figures(math.inf, math.inf, 0, [])


class Prices(Struct, frozen=True):
    """State of each replica, uint8 (n,); terms of each candidate, float64 (fit, len(TERMS)); places
    of the `BEST` best scores among them, best first, ties in order."""

    state: np.ndarray
    terms: np.ndarray
    best: list[int]
    figures: Figures


class Below(NamedTuple):
    """What lies in tiers below the devices, nearest first: leading blocks, int32 (tiers, n), and
    how fast each gives them, float64 (n, tiers, 2): latency and ms per block."""

    depths: np.ndarray
    speeds: np.ndarray


class Pricer(Protocol):
    """Filters and prices a whole pool."""

    def price(
        self,
        sheet: Sheet,
        demand: Demand,
        asked: np.ndarray,
        depths: np.ndarray,
        there: np.ndarray,
        now_s: float,
        below: Below | None = None,
        startup_ms: np.ndarray | None = None,
    ) -> Prices:
        """The answer lies in the sheet: use it before it is priced again.

        `asked` is uint8 (n,), `depths` and `there` int32 (n,): the leading blocks that each is
        believed to hold soon, and now. What is still to come waits for those who compute it.
        `below`: what each could bring there besides. `startup_ms`, float64 (n,): what else has to
        be brought there first, which counts as a transfer."""
