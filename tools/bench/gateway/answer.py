"""What every fake worker says, and how fast: enough to keep a gateway busy, nothing more."""

from __future__ import annotations

WORD = " warm"
SHORT_TOKENS = 8
"""Up to so many tokens come at once; a longer answer comes one token a tick."""
