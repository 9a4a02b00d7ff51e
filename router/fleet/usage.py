"""How much of its time a replica spends on prefill, from what its reports count."""

from __future__ import annotations

from msgspec import Struct

from events.load import ReplicaLoad

MEMORY_S = 30.0
"""What lies so far back counts for 1/e."""


FIRST_S = 5.0
"""Of what is heard first."""


class Usage(Struct):
    """Decaying sums over one life of a replica. `share` is in [0, 1]."""

    work_ms: float = 0.0
    told_s: float = 0.0
    tokens: int = -1

    def learn(self, load: ReplicaLoad, ms_per_token: float, after_s: float) -> None:
        """The next report, so long after the one before."""
        tokens = load.prompt_tokens_total - load.cached_tokens_total
        if self.tokens >= 0:
            kept = MEMORY_S / (MEMORY_S + after_s)
            computed = max(0, tokens - self.tokens)
            self.work_ms = kept * (self.work_ms + ms_per_token * computed)
            self.told_s = kept * (self.told_s + after_s)
        self.tokens = tokens

    @property
    def share(self) -> float:
        """Of about the last `MEMORY_S`; who was just met is not taken to be busy."""
        return min(1.0, 1e-3 * self.work_ms / MEMORY_S)

    @property
    def told_share(self) -> float:
        """Of the time that reports tell of; of less than `FIRST_S` the rest counts as busy."""
        unknown_s = max(0.0, FIRST_S - self.told_s)
        return min(1.0, (1e-3 * self.work_ms + unknown_s) / max(FIRST_S, self.told_s))
