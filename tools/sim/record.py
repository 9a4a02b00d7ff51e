"""What became of one request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Record:
    """Times in s, from the arrival. `replica` is where it was served in the end, `prefilled_by` who
    computed its prompt for that one."""

    tenant: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    replica: str = ""
    prefilled_by: str = ""
    cached_tokens: int = 0
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    failed: bool = False

    @property
    def tpot_s(self) -> float:
        """Between two tokens of its answer, on average; 0 for one that has but one."""
        return (self.e2e_s - self.ttft_s) / max(1, self.output_tokens - 1)
