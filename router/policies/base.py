"""What a policy sees of a choice, and what it answers. Policies know no fleet, no bus, no clock."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol, overload

import numpy as np
from msgspec import Struct

from events.decision import CandidateTerms
from router.choice.route import RouteQuery
from router.choice.sheet import TERMS, Best

_SCORE, _OVERLAP = map(TERMS.index, ("score", "overlap_blocks"))


class Candidate(Struct, frozen=True):
    """One replica that may take the request, with what is already on its way there counted in.

    `overlap_blocks` are leading blocks of the prompt that it is believed to hold. `requests` are
    waiting, running and just sent. `used_blocks` are in use, not merely cached.
    """

    replica: str
    overlap_blocks: int
    requests: int
    queued_prefill_tokens: int
    used_blocks: int
    total_blocks: int


class Candidates(Sequence[Candidate]):
    """Candidates by replica id. They are made when looked at; what most rules need of all of them
    lies in arrays: `replicas`, `terms` (float64 (candidates, cost.TERMS)), and of these `scores`
    and `overlaps` (leading blocks). `best` has the terms of the best score. `longest_blocks`: the
    most leading blocks that any of them holds; `may_fetch`: whether anything might be brought to
    one. Whoever surveys fills them in."""

    replicas: list[str]
    terms: np.ndarray
    best: Best
    longest_blocks: int
    may_fetch: bool
    _made: dict[int, Candidate]

    @abstractmethod
    def _make(self, place: int) -> Candidate: ...

    @abstractmethod
    def shown(self, first: str | None = None) -> Sequence[CandidateTerms]:
        """What is kept of them to be shown: `first`, then the others, the best first."""

    def __len__(self) -> int:
        return len(self.replicas)

    @property
    def scores(self) -> np.ndarray:
        """Of all, float64 (candidates,)."""
        return self.terms[:, _SCORE]

    @property
    def overlaps(self) -> np.ndarray:
        """Leading blocks of all, float64 (candidates,)."""
        return self.terms[:, _OVERLAP]

    def at_least(self, score: float) -> list[int]:
        """Places of those with such a score, in order."""
        return (self.terms[:, _SCORE] >= score).nonzero()[0].tolist()

    @overload
    def __getitem__(self, index: int) -> Candidate: ...

    @overload
    def __getitem__(self, index: slice) -> list[Candidate]: ...

    def __getitem__(self, index: int | slice) -> Candidate | list[Candidate]:
        places = range(len(self))[index]
        return self._at(places) if isinstance(places, int) else [self._at(i) for i in places]

    def _at(self, place: int) -> Candidate:
        made = self._made.get(place)
        if made is None:
            made = self._made[place] = self._make(place)
        return made


class Pick(Struct, frozen=True):
    """The replica chosen, and why in a few words."""

    replica: str
    reason: str


class Policy(Protocol):
    """A rule. `pick` changes nothing, so that it also serves explain; `placed` tells afterwards
    what really became of the choice."""

    name: str

    def pick(self, query: RouteQuery, candidates: Candidates, rng: random.Random) -> Pick: ...

    def placed(self, query: RouteQuery, candidates: Candidates, pick: Pick) -> None: ...


class Stateless:
    """Base of the rules that remember nothing."""

    def placed(self, query: RouteQuery, candidates: Sequence[Candidate], pick: Pick) -> None:
        """Nothing to remember."""


def least_loaded(candidates: Sequence[Candidate], rng: random.Random) -> Candidate:
    """Fewest requests, then least queued prefill; ties at random."""
    key = min((c.requests, c.queued_prefill_tokens) for c in candidates)
    return rng.choice([c for c in candidates if (c.requests, c.queued_prefill_tokens) == key])
