"""How long a backend may say nothing while it has requests.

A stream tells now and then that its server lives; a plain answer comes at its end, so a server that
hangs looks like one that writes a long one. What whole answers took says how long that can be.
"""

from __future__ import annotations

from router.backends.rates import LineFit

UNKNOWN_S = 60.0
"""Before the first answer."""

LEAST_S = 10.0
SLACK = 3.0
"""Times what an answer of that length takes on average."""

LONG_TOKENS = 1024
FORGETTING = 0.99


class Silence:
    """One backend's patience, learnt from its answers."""

    def __init__(self) -> None:
        self._whole = LineFit()
        self._longest_tokens = 0.0

    def answered(self, tokens: int, duration_ms: float) -> None:
        """A whole answer of so many tokens came after so long."""
        self._whole.add(tokens, duration_ms)
        self._longest_tokens = max(tokens, FORGETTING * self._longest_tokens)

    def allowed_s(self, most_tokens: int) -> float:
        """Until an answer of at most so many tokens must have come. Few are as long as they may:
        those seen tell how long an answer gets."""
        if not self._whole.confidence:
            return UNKNOWN_S
        base_ms, per_token_ms = self._whole.line()
        tokens = min(most_tokens, max(LONG_TOKENS, 2 * self._longest_tokens))
        return max(LEAST_S, SLACK * (base_ms + per_token_ms * tokens) / 1e3)
