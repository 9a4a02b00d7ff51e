"""One request of a trace: when it comes, what its prompt is made of, how long it answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


class TraceError(ValueError):
    """A trace that can't be read; the message names the line and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Call:
    """`blocks`: int64, one id for each started block of the prompt; equal ids stand for equal
    tokens behind equal heads. The last one may be partial. `arrival_s` counts from the start."""

    arrival_s: float
    tenant: str
    blocks: np.ndarray
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Calls in the order of their arrival, over blocks of `block_tokens`."""

    name: str
    block_tokens: int
    calls: tuple[Call, ...]

    @property
    def span_s(self) -> float:
        """From the first arrival to the last."""
        return self.calls[-1].arrival_s - self.calls[0].arrival_s

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts together."""
        return sum(call.prompt_tokens for call in self.calls)
