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
from kvstore.identity import KeyChain
from router.choice.reserve import SIZES
from router.locality.index import Seats
from router.locality.optimistic import PromiseSeats

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

EVIDENCE = ("trust", "digest_at_s", "load_at_s", "unknown", "queued_tokens")
"""What is shown beside a candidate's terms of what they rest on, as in its row of the table."""

BEST = 16
"""Candidates that are told along with the prices."""

LINE = ("place", "row", *TERMS, *EVIDENCE, "digest_blocks")
"""What is told of each of them. `digest_blocks`: of its overlap, what its digest says."""

FIT, NOT_ASKED, TOO_LONG, BARRED, BREAKER, UNHEARD = range(6)
"""Why a replica is no candidate."""

_head = struct.Struct(f"{4 + len(LINE)}d")


class Demand(Struct, frozen=True):
    """What the request asks of any replica; the deadline in ms from now."""

    prompt_tokens: int
    output_tokens: float
    block_tokens: int
    ttft_deadline_ms: float | None


class Best(Struct, frozen=True):
    """Over all candidates: the shortest TTFT, the shortest queue, the most leading blocks held, and
    the second best score; and the best one's `LINE`. Nothing is known of nobody."""

    soonest_ms: float = math.inf
    least_queued_tokens: float = math.inf
    longest_blocks: float = 0.0
    runner_up: float = -math.inf
    place: float = 0.0
    row: float = 0.0
    score: float = -math.inf
    saved_prefill_ms: float = 0.0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    decode_share_ms: float = 0.0
    harm_ms: float = 0.0
    eviction_ms: float = 0.0
    overload_ms: float = 0.0
    lateness_ms: float = 0.0
    ttft_ms: float = 0.0
    overlap_blocks: float = 0.0
    cached_tokens: float = 0.0
    new_blocks: float = 0.0
    usable_tokens: float = 0.0
    trust: float = 0.0
    digest_at_s: float = 0.0
    load_at_s: float = 0.0
    unknown: float = 0.0
    queued_tokens: float = 0.0
    digest_blocks: float = 0.0

    @property
    def cost_ms(self) -> float:
        """What the request costs at the best one, in all; inf where nobody may take it. Scores
        compare within a pool, costs do so between pools."""
        if self.score == -math.inf:
            return math.inf
        own_ms = self.queue_ms + self.prefill_ms + self.transfer_ms + self.decode_share_ms
        others_ms = self.harm_ms + self.eviction_ms + self.overload_ms + self.lateness_ms
        return own_ms + others_ms


NOBODY = Best()


class Prices(Struct, frozen=True):
    """Of one choice, over arrays of its sheet: use them before the next one.

    State of each replica, uint8 (n,), and whether `everybody` is a candidate; of each candidate its
    row, int64 (fit,), and terms, float64 (fit, len(TERMS)); the `LINE`s of the `BEST` best scores
    among them, best first, ties in order."""

    everybody: bool
    state: np.ndarray
    rows: np.ndarray
    terms: np.ndarray
    lines: np.ndarray
    best: Best


class Sheet:
    """One pool's numbers, for n replicas. Known of each: `table` (float64 (n, len(ROW))). Looked up
    for a query, int32 (n,): `there`, the leading blocks that its digest shows, and `depths`, with
    those that are on their way. And room for one answer, which the next choice takes again.
    `everybody`: uint8 (n,), all 1."""

    __slots__ = (
        "addresses", "answer", "at", "best", "depths", "everybody", "lines", "replicas", "rows",
        "state", "table", "terms", "there",
    )  # fmt: skip

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.table = np.zeros((replicas, len(ROW)))
        self.everybody = np.ones(replicas, np.uint8)
        self.there, self.depths = np.zeros((2, replicas), np.int32)
        self.state = np.empty(replicas, np.uint8)
        self.rows = np.empty(replicas, np.int64)
        self.terms = np.empty((replicas, len(TERMS)))
        self.best = np.empty(BEST, np.int64)
        self.answer = np.empty(4 + BEST * len(LINE))
        self.lines = self.answer[4:].reshape(BEST, len(LINE))
        arrays = (
            self.there,
            self.depths,
            self.state,
            self.terms,
            self.rows,
            self.best,
            self.answer,
        )
        # cost.h has the same as a struct.
        self.addresses = np.array(
            (address(self.table), replicas, *map(address, arrays), BEST), np.int64
        )
        self.at = address(self.addresses)

    def prices(self, fit: int) -> Prices:
        """What was just answered of so many candidates."""
        if not fit:
            return Prices(
                not self.replicas, self.state, self.rows[:0], self.terms[:0], self.lines[:0], NOBODY
            )
        best = Best(*_head.unpack_from(self.answer))
        if fit == self.replicas >= BEST:
            return Prices(True, self.state, self.rows, self.terms, self.lines, best)
        everybody, lines = fit == self.replicas, self.lines[: min(fit, BEST)]
        return Prices(everybody, self.state, self.rows[:fit], self.terms[:fit], lines, best)


class Below(NamedTuple):
    """What lies in tiers below the devices, nearest first: leading blocks, int32 (tiers, n), and
    how fast each gives them, float64 (n, tiers, 2): latency and ms per block."""

    depths: np.ndarray
    speeds: np.ndarray


class Pricer(Protocol):
    """Looks a chain up, filters and prices a whole pool, on its sheet."""

    def look(self, sheet: Sheet, seats: Seats, chain: KeyChain, promises: PromiseSeats) -> None:
        """Fill in `there` and `depths`: the leading blocks that each is believed to hold now, and
        soon."""

    def price(
        self,
        sheet: Sheet,
        demand: Demand,
        now_s: float,
        asked: np.ndarray | None = None,
        below: Below | None = None,
        startup_ms: np.ndarray | None = None,
    ) -> Prices:
        """Of what was looked up. What is still to come waits for those who compute it.

        `asked`, uint8 (n,): who may be asked at all, None for everybody. `below`: what each could
        bring there besides. `startup_ms`, float64 (n,): what else has to be brought there first,
        which counts as a transfer."""

    def survey(
        self,
        sheet: Sheet,
        seats: Seats,
        chain: KeyChain,
        promises: PromiseSeats,
        demand: Demand,
        now_s: float,
        asked: np.ndarray | None = None,
        below: Below | None = None,
        startup_ms: np.ndarray | None = None,
    ) -> Prices:
        """Both in one go."""
