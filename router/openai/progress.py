"""What the choices of one reply have said so far, and which of them are still open.

Shared by streams and collected bodies; knows nothing of JSON.
"""

from __future__ import annotations

from msgspec import Struct, field

from events.errors import CoreError, InvariantError
from events.output import CLEAN_FINISHES, CoreDelta, CoreFinish, Usage
from router.openai.usage import UsageBody, total

ABORTED = CoreError(
    status=503,
    message="The request was aborted before its answer was complete.",
    type="server_error",
    code="aborted",
    retry_after_s=1.0,
)
"""For a choice that the replica gave up without saying why."""


class Choice(Struct):
    """One choice. `texts` and `token_ids` grow until `finish` is set, bounded by max_tokens."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    usage: Usage | None = None
    finish: str | None = None

    @property
    def text(self) -> str:
        """Everything said."""
        return "".join(self.texts)


class Progress:
    """All choices of a reply: `n` for each of `prompts` prompts, in that order."""

    def __init__(self, prompts: int, n: int) -> None:
        self.choices = tuple(map(Choice, range(prompts * n)))
        self.error: CoreError | None = None
        self._prompts = prompts
        self._n = n
        self._open = len(self.choices)

    @property
    def done(self) -> bool:
        """Every choice ended cleanly."""
        return self._open == 0

    def note(self, delta: CoreDelta, prompt: int = 0) -> Choice:
        """Take in one delta of `prompt`; sets `error` when the choice ended badly.

        Raises InvariantError for a choice that doesn't exist or has ended.
        """
        child = delta.child
        if not 0 <= child < self._n or not 0 <= prompt < self._prompts:
            raise InvariantError(f"a delta for child {child} of {self._n}")
        choice = self.choices[prompt * self._n + child]
        if choice.finish is not None:
            raise InvariantError(f"a delta for choice {choice.index} after its end")
        choice.texts.append(delta.text)
        choice.token_ids.extend(delta.token_ids)
        choice.usage = delta.usage
        if delta.finish is not None:
            self._finish(choice, delta.finish)
        return choice

    def _finish(self, choice: Choice, finish: CoreFinish) -> None:
        choice.finish = finish.reason
        if choice.finish in CLEAN_FINISHES:
            self._open -= 1
        else:
            self.error = finish.error or ABORTED

    def usage(self) -> UsageBody:
        """Counts so far, over all choices."""
        return total([choice.usage for choice in self.choices], self._n)
