"""What limits and queue need of the other routers, and tell them: here, that there are none."""

from __future__ import annotations

from events.peer import Inside

NOTHING = Inside(b"")


class Others:
    """A router that stands alone. See router.cluster.use for one among several."""

    def spent(self, name: str, requests: int, tokens: int) -> None:
        """So much went off a tenant's limits a minute here."""

    def worked(self, name: str, tokens: int) -> None:
        """So much prefill was placed here for a tenant."""

    def touched(self, name: str) -> None:
        """What a tenant has inside or waiting here is another number now."""

    def elsewhere(self, name: str) -> Inside:
        """What a tenant has at the others, as far as they have told."""
        return NOTHING


ALONE = Others()
