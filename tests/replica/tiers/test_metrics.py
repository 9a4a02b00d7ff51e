"""What a scrape shows of the tiers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from replica.tiers.metrics import TierMetrics
from tests.fakes.slow_tier import SlowTier
from tests.replica.sched.rig import tokens_of
from tests.replica.tiers.rig import tiered

PROMPT = tokens_of(1, 26)


def test_a_scrape_tells_what_went_where_and_why_not() -> None:
    near, far = SlowTier("near"), SlowTier("far", trusted=False)
    with tiered(near, far) as (rig, _, _):
        rig.run(PROMPT)
        rig.forget()
        near.spoil = lambda place, payload: payload.__setitem__(0, payload[0] ^ 1)
        rig.run(PROMPT)
        rig.forget()
        rig.run(PROMPT)
        rig.settle()
        registry = CollectorRegistry()
        registry.register(TierMetrics(rig.tiers))
        text = generate_latest(registry).decode()
    shown = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    prefix = "warmroute_replica_kv_"
    assert float(shown[prefix + 'stored_blocks_total{tier="near"}']) >= 7
    assert float(shown[prefix + 'refused_blocks_total{reason="payload",tier="near"}']) >= 1
    assert float(shown[prefix + 'stored_blocks_total{tier="far"}']) >= 6
    assert float(shown[prefix + 'hit_blocks_total{tier="far"}']) > 0
    assert float(shown[prefix + 'loads_total{end="done"}']) >= 2
    assert shown[prefix + 'write_backlog_blocks{to="host"}'] == "0.0"
    assert "salt" not in text
