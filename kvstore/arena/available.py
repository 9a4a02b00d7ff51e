"""How much memory may still be taken here: the machine's, or that of the control group (v2)."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_DEFAULT_SHARE = 4
_MAX_DEFAULT_BYTES = 1 << 30
_MIN_DEFAULT_BYTES = 16 << 20


def available_bytes(meminfo: Path = _MEMINFO, group: Path = _GROUP) -> int | None:
    """The lesser of what the kernel and the group would give now; None where nobody says."""
    known = [size for size in (_machine(meminfo), _group(group)) if size is not None]
    return min(known, default=None)


def _machine(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1_024
    return None


def _group(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def default_bytes(meminfo: Path = _MEMINFO, group: Path = _GROUP) -> int:
    """What an arena takes that nobody has given a size: a quarter of what is free, at most 1 GiB,
    since all of it is taken at the start."""
    available = available_bytes(meminfo, group)
    share = _MAX_DEFAULT_BYTES if available is None else available // _DEFAULT_SHARE
    return max(_MIN_DEFAULT_BYTES, min(share, _MAX_DEFAULT_BYTES))
