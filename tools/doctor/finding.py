"""What a check found, in plain words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """GOOD; SLOW: it works, but less well than it could; BROKEN: something won't work."""

    GOOD = "ok"
    SLOW = "slow"
    BROKEN = "lacks"


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy`: what to do about it; empty where nothing is to be done."""

    verdict: Verdict
    about: str
    text: str
    remedy: str = ""
