"""What became of one request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Record:
    """Times in s, from the arrival. `replica` is where it was served in the end."""

    tenant: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    replica: str = ""
    cached_tokens: int = 0
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    failed: bool = False
