"""The router's benchmark, small: it measures what it says, and writes it down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from events.load import DigestShape
from tools.bench import cli, router


def test_the_figures_of_the_router_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(router, "CASES", ((2, 8), (64, 20)))
    monkeypatch.setattr(router, "SHAPE", DigestShape(bits=1 << 12, k=8))
    monkeypatch.setattr(router, "FILL_BLOCKS", 256)
    monkeypatch.setattr(router, "COLD_CHAINS", 20)
    file = tmp_path / "router.json"
    cli.main(["router", "--rounds", "1", "--calls", "5", "--json", str(file)])
    found = json.loads(file.read_text())
    for name in ("decision_p99_us", "index_p99_us"):
        assert found[name].keys() == {"2x8", "64x20"}
        assert min(found[name].values()) > 0
    assert found["bytes_per_block"] == 2.0
    assert found["wrong_depth_ratio"] == 0.0
    assert found["ingest_changes_per_s"] > 0
