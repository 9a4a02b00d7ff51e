"""Which attempt of a request counts. A router may say a thing twice; it is computed once.

A later attempt fences the earlier one. The same attempt again is refused while it is served, and
gets the same answer for a while after it was answered. Requests are known by the router's boot and
its id for them, whichever link they come over. Bounded in answers, deltas and time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from events.output import CLEAN_FINISHES, CoreDelta
from replica.front.check import refuse

if TYPE_CHECKING:
    from replica.front.attempts import Attempt

MAX_ANSWERS = 4_096
MAX_DELTAS = 65_536
"""Kept in all, those of attempts that are still served included; about 30 MB."""

KEPT_S = 30.0


class RequestKey(NamedTuple):
    """One request of one life of a router."""

    router_boot: str
    request_id: str


@dataclass(frozen=True, slots=True)
class _Answer:
    """`said` is None where it was not clean, or too much to keep: then it is computed again."""

    attempt: int
    said: tuple[CoreDelta, ...] | None
    until_s: float

    @property
    def deltas(self) -> int:
        return len(self.said or ())


class Fence:
    """Knows live attempts and recent answers; ends nothing itself."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._live: dict[RequestKey, Attempt] = {}
        self._answers: OrderedDict[RequestKey, _Answer] = OrderedDict()
        self._said: dict[Attempt, list[CoreDelta]] = {}
        self._deltas = 0

    def enter(self, key: RequestKey, attempt: int) -> tuple[CoreDelta, ...] | None:
        """What this very attempt has answered, or None when it is to be served. Raises UserError
        for one that is being served, or that came after a later one."""
        self._expire()
        live, answer = self._live.get(key), self._answers.get(key)
        if live is not None and live.key.attempt == attempt:
            refuse("This attempt is already being served.", "duplicate_request", status=409)
        newest = max(live.key.attempt if live else -1, answer.attempt if answer else -1)
        if attempt < newest:
            refuse("A later attempt of this request was made.", "stale_attempt", status=409)
        return answer.said if answer is not None and answer.attempt == attempt else None

    def live(self, key: RequestKey) -> Attempt | None:
        """The attempt of this request that is being served."""
        return self._live.get(key)

    def begin(self, attempt: Attempt) -> None:
        """It is served from now on."""
        self._live[attempt.request] = attempt
        self._said[attempt] = []

    def note(self, attempt: Attempt, delta: CoreDelta) -> None:
        """It says this. Answers with logprobs are too large to be kept."""
        said = self._said.get(attempt)
        if said is None:
            return
        if delta.logprobs or self._deltas >= MAX_DELTAS:
            self._forget_said(attempt)
            return
        said.append(delta)
        self._deltas += 1

    def end(self, attempt: Attempt) -> None:
        """All its children have ended."""
        said = self._said.get(attempt)
        ends = [delta.finish.reason for delta in said or () if delta.finish is not None]
        kept = tuple(said) if said and all(reason in CLEAN_FINISHES for reason in ends) else None
        self.drop(attempt)
        answer = _Answer(attempt.key.attempt, kept, self._clock() + KEPT_S)
        older = self._answers.pop(attempt.request, None)
        if older is not None:
            self._deltas -= older.deltas
        self._answers[attempt.request] = answer
        self._deltas += answer.deltas
        self._expire()

    def drop(self, attempt: Attempt) -> None:
        """Nobody waits for it any more."""
        self._forget_said(attempt)
        if self._live.get(attempt.request) is attempt:
            del self._live[attempt.request]

    def _forget_said(self, attempt: Attempt) -> None:
        self._deltas -= len(self._said.pop(attempt, ()))

    def _expire(self) -> None:
        now_s = self._clock()
        while self._answers:
            key, oldest = next(iter(self._answers.items()))
            if oldest.until_s > now_s and len(self._answers) <= MAX_ANSWERS:
                return
            del self._answers[key]
            self._deltas -= oldest.deltas
