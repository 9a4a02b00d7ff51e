"""Which dispatches of which router this engine has taken in: part of every load report."""

from __future__ import annotations

MAX_ROUTERS = 64


class SeenDispatches:
    """The largest dispatch number per router boot; forgets the router heard of longest ago."""

    def __init__(self, limit: int = MAX_ROUTERS) -> None:
        self._limit = limit
        self._seen: dict[str, int] = {}

    def note(self, router_boot: str, dispatch_seq: int) -> None:
        """A request of that router was taken in; an empty boot is nobody's."""
        if not router_boot:
            return
        last = self._seen.pop(router_boot, 0)
        self._seen[router_boot] = max(last, dispatch_seq)
        if len(self._seen) > self._limit:
            del self._seen[next(iter(self._seen))]

    def snapshot(self) -> dict[str, int]:
        """A copy."""
        return dict(self._seen)
