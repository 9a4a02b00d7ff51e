"""Tokens that a plan takes from the one before it: known here first, for here they are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from replica.sched.plan import PENDING, ChildId, PlanRow, RowResult


class LastTokens:
    """What the last plan sampled, by child. A plan that failed sampled nothing."""

    def __init__(self) -> None:
        self._tokens: dict[ChildId, int] = {}

    def fill(self, rows: Sequence[PlanRow]) -> list[PlanRow | None]:
        """The rows with their pending tokens; None where the child got none."""
        return [self._filled(row) if PENDING in row.token_ids else row for row in rows]

    def note(self, results: Sequence[RowResult]) -> None:
        """A plan was executed."""
        self._tokens = {
            result.child: result.token_id for result in results if result.token_id is not None
        }

    def _filled(self, row: PlanRow) -> PlanRow | None:
        token_id = self._tokens.get(row.child)
        if token_id is None or len(row.token_ids) != 1:
            return None
        return replace(row, token_ids=(token_id,))
