"""All requests that are not gone yet, by state and in service order. The only place that moves a
request from one state to another.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from operator import attrgetter, itemgetter

from events.errors import InvariantError
from replica.sched.order import Rank
from replica.sched.plan import ChildId
from replica.sched.request import Request, State

NEVER_S = float("inf")

_rank = attrgetter("rank")
_moment_s = itemgetter(0)

_MOVES = {
    State.QUEUED: {State.LOADING, State.RUNNING, State.HELD, State.ABORTING, State.FINISHING},
    State.LOADING: {State.RUNNING, State.HELD, State.ABORTING, State.FINISHING},
    State.RUNNING: {
        State.HELD,
        State.WRITING,
        State.DRAINING,
        State.ABORTING,
        State.FINISHING,
    },
    State.HELD: {
        State.QUEUED,
        State.RUNNING,
        State.WRITING,
        State.DRAINING,
        State.ABORTING,
        State.FINISHING,
    },
    State.WRITING: {State.ABORTING, State.FINISHING},
    State.DRAINING: {
        State.QUEUED,
        State.HELD,
        State.WRITING,
        State.ABORTING,
        State.FINISHING,
    },
    State.ABORTING: {State.GONE},
    State.FINISHING: {State.GONE},
    State.GONE: set(),
}


class RequestTable:
    """`waiting`, `loading`, `running`, `held` and `writing` are sorted by rank; treat them as
    read-only."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self.held: list[Request] = []
        self.writing: list[Request] = []
        self.waiting_tokens = 0
        self.waiting_hit_tokens = 0
        self._requests: dict[ChildId, Request] = {}
        self._deadlines: list[tuple[float, ChildId]] = []
        self._lists = {
            State.QUEUED: self.waiting,
            State.LOADING: self.loading,
            State.RUNNING: self.running,
            State.HELD: self.held,
            State.WRITING: self.writing,
        }

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, child: ChildId) -> bool:
        return child in self._requests

    def get(self, child: ChildId) -> Request | None:
        """The request, unless unknown or gone."""
        return self._requests.get(child)

    def add(self, request: Request) -> None:
        """A new request, QUEUED. Raises InvariantError when its number is taken."""
        if request.child in self._requests:
            raise InvariantError(f"child {request.child} is already here")
        self._requests[request.child] = request
        if request.spec.deadline_s is not None:
            insort(self._deadlines, (request.spec.deadline_s, request.child))
        self._enter(request)

    def move(self, request: Request, target: State) -> None:
        """Change its state. Raises InvariantError for a move that the design doesn't have."""
        if target not in _MOVES[request.state]:
            raise InvariantError(f"{request.state.name} can't become {target.name}")
        self._leave(request)
        request.state = target
        self._enter(request)
        deadline_s = request.spec.deadline_s
        if deadline_s is not None and target in (State.ABORTING, State.FINISHING):
            del self._deadlines[bisect_left(self._deadlines, (deadline_s, request.child))]

    @property
    def next_deadline_s(self) -> float:
        """When the first of those that have not ended has to."""
        return self._deadlines[0][0] if self._deadlines else NEVER_S

    def expired(self, now_s: float) -> list[Request]:
        """Those that have not ended and whose deadline has passed, the earliest first."""
        past = bisect_right(self._deadlines, now_s, key=_moment_s)
        return [self._requests[child] for _, child in self._deadlines[:past]]

    def rerank(self, request: Request, rank: Rank) -> None:
        """Give it another place in the service order."""
        listed = self._lists.get(request.state)
        if listed is not None:
            del listed[self._place(listed, request)]
        request.rank = rank
        if listed is not None:
            insort(listed, request, key=_rank)

    def share_before(self, rank: Rank) -> float:
        """The share of the waiting requests that are served before `rank`."""
        return bisect_left(self.waiting, rank, key=_rank) / max(1, len(self.waiting))

    def expect_hit(self, request: Request, tokens: int) -> None:
        """A waiting request is now expected to find `tokens` in the cache."""
        self.waiting_hit_tokens += tokens - request.expected_hit
        request.expected_hit = tokens

    def _enter(self, request: Request) -> None:
        members = self._lists.get(request.state)
        if members is not None:
            insort(members, request, key=_rank)
        if request.state is State.QUEUED:
            request.queued_tokens = len(request.tokens)
            self.waiting_tokens += request.queued_tokens
            self.waiting_hit_tokens += request.expected_hit
        elif request.state is State.GONE:
            del self._requests[request.child]

    def _leave(self, request: Request) -> None:
        members = self._lists.get(request.state)
        if members is not None:
            del members[self._place(members, request)]
        if request.state is State.QUEUED:
            self.waiting_tokens -= request.queued_tokens
            self.waiting_hit_tokens -= request.expected_hit

    @staticmethod
    def _place(members: list[Request], request: Request) -> int:
        place = bisect_left(members, request.rank, key=_rank)
        if place == len(members) or members[place] is not request:
            raise InvariantError("a request is listed under its state")
        return place
