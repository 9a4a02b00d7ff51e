"""`warmroute bench orders`: every order serves everybody, and repeats to the figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.bench import cli
from tools.bench.orders.backlog import QUEUES
from tools.errors import CommandError

TRACE = "agents:kinds=2,system=600,turns=3,step=200,output=20,rates=2,stage_s=10,block=50"


def run(tmp_path: Path, *flags: str) -> dict[str, Any]:
    out = tmp_path / "orders.json"
    common = ["--device", "a10g-7b", "--kv-tokens", "40000", "--waiting", "8", "--json", str(out)]
    common += ["--steps", "12", "--rounds", "1"]
    assert cli.main(["orders", TRACE, *common, *flags]) == 0
    return json.loads(out.read_text())


def without_cpu(orders: dict[str, Any]) -> dict[str, Any]:
    kept = {"slo_share", "refused", "ttft_mean_s", "longest_wait_s", "cached_token_ratio"}
    return {name: {key: of[key] for key in kept} for name, of in orders.items()}


def test_orders_differ_only_in_who_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(tmp_path, "--load", "2.5")
    orders = found["orders"]
    assert set(orders) == {"fcfs", "priority", "deadline"}
    assert orders["fcfs"]["refused"] == orders["priority"]["refused"] == 0
    said = capsys.readouterr().out
    assert all(name in said for name in (*orders, "plan p99"))
    for figures in orders.values():
        assert 0.0 <= figures["slo_share"] <= 1.0
        assert set(figures["backlog"]) == set(QUEUES)
        assert all(costs["plan_p99_us"] > 0.0 for costs in figures["backlog"].values())
    assert without_cpu(run(tmp_path, "--load", "2.5")["orders"]) == without_cpu(orders)


def test_a_pool_below_two_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="less than two blocks"):
        run(tmp_path, "--kv-tokens", "60")
