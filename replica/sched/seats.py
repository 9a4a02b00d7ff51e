"""Who has a seat while one step is planned, and what they are all believed to need.

Made once per plan, and kept in step with whom the plan starts: whoever asks the ledger for a place
doesn't pay for everybody who has one.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

from replica.sched.lengths import OutputLengths
from replica.sched.request import Request


class Need(NamedTuple):
    """Of one request: tokens still to come, those that it knows beyond its blocks (rounded up to
    whole ones), and the blocks that it gives back at its end, if that is in sight."""

    rest_tokens: int
    missing_tokens: int
    returned_blocks: int


def need_of(
    request: Request, held_blocks: int, kept_blocks: int, lengths: OutputLengths, block_tokens: int
) -> Need:
    """Of a request with `held_blocks` blocks, `kept_blocks` of which stay behind for others."""
    rest = lengths.rest(request)
    missing_tokens = len(request.tokens) + block_tokens - 1 - held_blocks * block_tokens
    returned = max(0, held_blocks - kept_blocks) if rest.ends else 0
    return Need(rest.tokens, missing_tokens, returned)


class Seats:
    """`turns`: prompts that are computed by turns now. `needs`: those that go on longest first."""

    def __init__(
        self, requests: Sequence[Request], lengths: OutputLengths, block_tokens: int
    ) -> None:
        self.requests = list(requests)
        self.turns = sum(request.debt > 1 for request in requests)
        self._lengths = lengths
        self._block_tokens = block_tokens
        self._needs: list[Need] | None = None
        self._most_tokens = 0

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        """One more, started by this plan."""
        self.requests.append(request)
        self.turns += request.debt > 1
        if self._needs is not None:
            self._take(request, self._needs)

    @property
    def needs(self) -> Sequence[Need]:
        """Worked out when they are first asked for."""
        if self._needs is None:
            self._needs = []
            for request in self.requests:
                self._take(request, self._needs)
        return self._needs

    @property
    def most_tokens(self) -> int:
        """More than they ever need at once, beyond what they hold."""
        return self._most_tokens if self.needs else 0

    @property
    def least_rest_tokens(self) -> int:
        """Until the first of them ends; 0 where there is none."""
        return self.needs[-1].rest_tokens if self.needs else 0

    def _take(self, request: Request, needs: list[Need]) -> None:
        kept = request.cached_tokens // self._block_tokens
        need = need_of(request, len(request.blocks), kept, self._lengths, self._block_tokens)
        insort(needs, need, key=_longest_first)
        self._most_tokens += max(0, need.missing_tokens) + need.rest_tokens


def _longest_first(need: Need) -> int:
    return -need.rest_tokens
