"""`warmroute bench evict`: every order is prefix-closed here too, and a larger pool holds more."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tools.bench import cli
from tools.bench.evict import ORDERS, Adaptive, Cache

TRACE = "agents:kinds=3,system=600,turns=3,step=200,output=20,rates=2,stage_s=10,block=50"


def test_the_figures_are_shares_and_grow_with_the_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "evict.json"
    assert cli.main(["evict", TRACE, "--json", str(out)]) == 0
    found, said = json.loads(out.read_text()), capsys.readouterr().out
    assert set(found) == set(ORDERS)
    for name, ratios in found.items():
        assert name in said
        assert 0.0 <= min(ratios.values()) <= max(ratios.values()) < 1.0
        assert ratios["0.4"] >= ratios["0.05"]


@pytest.mark.parametrize("name", ORDERS)
def test_what_is_resident_is_prefix_closed(name: str) -> None:
    rng = random.Random(3)
    cache = Cache(ORDERS[name](12), 12)
    for _ in range(400):
        path = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
        keys = [bytes(path[: end + 1]) for end in range(len(path))]
        cache.ask(keys)
        resident = cache._nodes
        assert len(resident) <= 12
        assert all(len(key) == 1 or key[:-1] in resident for key in resident)
        assert len(cache._order) == len(resident)


def test_the_adaptive_order_gives_way_to_what_left_too_early() -> None:
    order = Adaptive(10)
    cache = Cache(order, 10)
    for key in range(30):
        cache.ask([bytes([key])])
    before = order.protected_blocks
    cache.ask([bytes([15])])
    assert order.protected_blocks < before
