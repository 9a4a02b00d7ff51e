"""Which stores below their devices the replicas of one pool can read: their own tiers, which their
digests show, and those of other hosts, which are shown by the replicas there.

Nearest first: the host's memory, other hosts', the store for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from events.load import FetchFit
from router.fleet.member import Member
from router.locality.below import TIERS

MAX_PEERS = 4
"""Of one replica that are reckoned with."""

NOBODY = -1


class Stores:
    """For the rows of one board. `names[place]`: the name that each row has for the store there,
    empty for none and for one of its own; `shown`: of those that digests show. `numbers[place]`
    tells the places apart for good, however many peers there are: a tier's number, then the
    peers'; `of_peers`: their places."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.shown = [[store_of(member, tier) for member in members] for tier in range(TIERS)]
        peers = [_peers(member) for member in members]
        most = max(map(len, peers), default=0)
        read = [[of[slot] if slot < len(of) else "" for of in peers] for slot in range(most)]
        self.names = [self.shown[0], *read, *self.shown[1:]]
        self.numbers = [0, *range(TIERS, TIERS + most), *range(1, TIERS)]
        self.of_peers = [place for place, number in enumerate(self.numbers) if number >= TIERS]
        self._shower = np.array([self._showers(names) for names in read], np.int64)

    def reached(self, depths: np.ndarray) -> np.ndarray:
        """From leading blocks in the tiers, int32 (TIERS, rows), to those at each place."""
        if not len(self._shower):
            return depths
        flat = np.append(depths.ravel(), np.int32(0))  # NOBODY shows nothing
        return np.concatenate((depths[:1], flat[self._shower], depths[1:]))

    def fits(self, member: Member) -> Iterator[tuple[int, int, FetchFit]]:
        """(number, place, speed) of what the member reads from."""
        hello, load = member.hello, member.load
        assert load is not None
        own, others = load.fetch[: len(hello.tiers)], load.fetch[len(hello.tiers) :]
        told = [*enumerate(own[:TIERS]), *enumerate(others[:MAX_PEERS], TIERS)]
        for number, fit in told:
            if number in self.numbers:
                yield number, self.numbers.index(number), fit

    def _showers(self, names: Sequence[str]) -> list[int]:
        """For each row the place, counted through `depths`, where its peer's store is shown."""
        width = len(names)
        first: dict[str, int] = {}
        for tier, shown in enumerate(self.shown):
            for row, name in enumerate(shown):
                first.setdefault(name, tier * width + row)
        return [first.get(name, NOBODY) if name else NOBODY for name in names]


def store_of(member: Member, tier: int) -> str:
    """The store that a member names as its tier; empty for none, and for one of its own."""
    tiers = member.hello.tiers
    return tiers[tier] if tier < len(tiers) else ""


def reads(member: Member, store: str) -> bool:
    """Whether it can read from a store: one of its tiers, or another host's."""
    return store in member.hello.tiers or store in member.hello.peers[:MAX_PEERS]


def store_named(member: Member, number: int) -> str:
    """What a number of `Stores` means, for people."""
    peer = number - TIERS
    names = member.hello.tiers if peer < 0 else member.hello.peers
    at = number if peer < 0 else peer
    return (names[at] if at < len(names) else "") or f"tier {number + 1}"


def _peers(member: Member) -> list[str]:
    """One that it has as a tier too is left out."""
    known = member.hello.tiers
    return ["" if name in known else name for name in member.hello.peers[:MAX_PEERS]]
