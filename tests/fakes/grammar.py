"""A grammar without a library: the n-th token has to leave n % 3 when divided by three, and after
so many the answer is whole. It knows how far it is, so that a runner can tell whether a row was
planned on a state that isn't certain yet."""

from __future__ import annotations

from collections.abc import Sequence

STEP = 3


class FakeGrammar:
    """As much of a GrammarState as scheduler and fake runner ask for. `begins_at`: length
    of the prompt. `gives_up_at`: after so many
    tokens it costs more than it may, as a library's does."""

    def __init__(self, begins_at: int, whole: int, gives_up_at: int | None = None) -> None:
        self.begins_at = begins_at
        self.whole = whole
        self.gives_up_at = gives_up_at
        self.place = 0
        self.failed = False

    @property
    def position(self) -> int:
        """Where the token stands that it masks now."""
        return self.begins_at + self.place

    @property
    def finished(self) -> bool:
        return self.place >= self.whole and not self.failed

    def allows(self, token: int) -> bool:
        return token % STEP == self.place % STEP

    def advance(self, token_ids: Sequence[int]) -> bool:
        for token in token_ids:
            self.failed |= not self.allows(token) or self.place == self.gives_up_at
            if self.failed:
                return False
            self.place += 1
        return True

    def fresh(self) -> FakeGrammar:
        """The same, at its beginning."""
        return FakeGrammar(self.begins_at, self.whole, self.gives_up_at)
