"""How busy the machine was meanwhile."""

from __future__ import annotations

from pathlib import Path

_STAT = Path("/proc/stat")


class CpuShare:
    """Of all CPUs, from when it is made."""

    def __init__(self) -> None:
        self._before = _times()

    def share(self) -> float | None:
        """In [0, 1]; None where the system does not tell."""
        if self._before is None or (now := _times()) is None:
            return None
        busy, total = now[0] - self._before[0], now[1] - self._before[1]
        return busy / total if total else None


def _times() -> tuple[int, int] | None:
    """Busy and all ticks."""
    try:
        ticks = [int(word) for word in _STAT.read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return None
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
