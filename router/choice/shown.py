"""What is kept of a choice's candidates to be shown.

The structs are made when the first of them is read, which for most choices is after the request is
on its way.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import repeat
from typing import overload

import numpy as np
from msgspec.structs import replace

from events.decision import CandidateTerms
from router.choice.sheet import EVIDENCE, LINE, TERMS

LINE_ROW = LINE.index("row")
LINE_TERMS = slice(LINE.index(TERMS[0]), LINE.index(TERMS[-1]) + 1)
LINE_EVIDENCE = slice(LINE.index(EVIDENCE[0]), LINE.index(EVIDENCE[-1]) + 1)
_LINE_BYTES = 8 * len(LINE)


class _Lazy(Sequence[CandidateTerms]):
    """Made once."""

    __slots__ = ("_made",)

    _made: list[CandidateTerms] | None

    @overload
    def __getitem__(self, index: int) -> CandidateTerms: ...

    @overload
    def __getitem__(self, index: slice) -> list[CandidateTerms]: ...

    def __getitem__(self, index: int | slice) -> CandidateTerms | list[CandidateTerms]:
        if self._made is None:
            self._made = self._make()
        return self._made[index]

    @abstractmethod
    def _make(self) -> list[CandidateTerms]: ...


class Shown(_Lazy):
    """Of one pool."""

    __slots__ = ("_lead", "_lines", "_names", "_now_s", "_why")

    def __init__(
        self, names: list[str], lines: bytes, lead: int, why: list[str], now_s: float
    ) -> None:
        """`names` by row, and `LINE`s, of which the one of row `lead` comes first, if any does; why
        the last ones are no candidates."""
        self._made = None
        self._names = names
        self._lines = lines
        self._lead = lead
        self._why = why
        self._now_s = now_s

    def __len__(self) -> int:
        return len(self._lines) // _LINE_BYTES

    def _make(self) -> list[CandidateTerms]:
        """Column by column: a struct is quickly made, its numbers one by one are not."""
        lines = np.frombuffer(self._lines).reshape(-1, len(LINE))
        rows = lines[:, LINE_ROW].tolist()
        if self._lead in rows[1:]:
            lead = rows.index(self._lead)
            lines = lines[[lead, *range(lead), *range(lead + 1, len(rows))]]
        columns = lines.T
        terms = columns[LINE_TERMS].tolist()
        trust, digest_at_s, load_at_s, unknown, _ = columns[LINE_EVIDENCE]
        score, saved, queue, prefill, transfer, *others, _, overlap, _, _, _ = terms
        return list(
            map(
                CandidateTerms,
                [self._names[int(row)] for row in columns[LINE_ROW].tolist()],
                score,
                saved,
                queue,
                prefill,
                transfer,
                *others,
                map(int, overlap),
                trust.tolist(),
                (1e3 * (self._now_s - digest_at_s)).tolist(),
                (1e3 * (self._now_s - load_at_s)).tolist(),
                [*repeat(None, len(self) - len(self._why)), *self._why],
                ["optimistic" if blind else "digest" for blind in unknown.tolist()],
            )
        )


class ShownOfPools(_Lazy):
    """Of several pools, one after another; each of them says which it is of."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[tuple[str, Sequence[CandidateTerms]]]) -> None:
        self._made = None
        self._parts = parts

    def __len__(self) -> int:
        return sum(len(part) for _, part in self._parts)

    def _make(self) -> list[CandidateTerms]:
        return [replace(of, pool=pool) for pool, part in self._parts for of in part]
