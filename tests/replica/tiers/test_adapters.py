"""What was computed with an adapter comes back from the tiers for that adapter alone."""

from __future__ import annotations

from tests.fakes.adapter_loader import FakeAdapters
from tests.fakes.memory_tier import MemoryTier
from tests.replica.sched.rig import tokens_of
from tests.replica.tiers.rig import tiered

PROMPT = tokens_of(1, 26)
"""Six full blocks and a rest."""


def test_C5_the_store_keeps_adapters_and_contents_apart() -> None:
    near = MemoryTier(1 << 24)
    adapters = FakeAdapters("x", "y", instant=True)
    spaces = (None, ("x", "one"), ("y", "one"), ("x", "two"))
    with tiered(near, adapters=adapters, max_adapters=2) as (rig, runner, mover):
        for adapter in spaces:
            first = rig.submit(PROMPT, adapter=adapter)
            rig.assert_right(runner, first)
            assert rig.sink.end_of(first).cached_tokens == 0
            rig.forget()
        assert not mover.scattered
        for number, adapter in enumerate(spaces, 1):
            again = rig.submit(PROMPT, adapter=adapter)
            rig.assert_right(runner, again)
            assert rig.sink.end_of(again).cached_tokens == 24
            assert len(mover.scattered) == 6 * number
            rig.forget()
        rig.assert_nothing_left()
