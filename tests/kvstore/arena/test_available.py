"""What may still be taken."""

from __future__ import annotations

from pathlib import Path

from kvstore.arena.available import available_bytes, default_bytes


def test_the_lesser_of_machine_and_group_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert available_bytes(meminfo, tmp_path) is None
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:      100 kB\n")
    assert available_bytes(meminfo, tmp_path) == 102_400
    (tmp_path / "memory.current").write_text("5000\n")
    for limit, available in (("max", 102_400), ("6000", 1_000), ("4000", 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert available_bytes(meminfo, tmp_path) == available


def test_a_quarter_of_what_is_free_is_the_default_within_bounds(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    for free_kb, default in ((400_000, 102_400_000), (10, 16 << 20), (1 << 30, 1 << 30)):
        meminfo.write_text(f"MemAvailable: {free_kb} kB\n")
        assert default_bytes(meminfo, tmp_path) == default
