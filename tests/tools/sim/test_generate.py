"""Traces made up: who shares what, when they come, and what is wrong with a bad description."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tools.sim.call import TraceError
from tools.sim.generate import generate


def shared(one: np.ndarray, other: np.ndarray) -> int:
    """Leading ids that are equal."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def test_groups_share_their_system_prompt_and_nothing_else() -> None:
    trace = generate("groups:groups=3,prompts=2,system=250,question=130,output=7,rates=5,stage_s=9")
    by_group: dict[str, list[np.ndarray]] = {}
    for call in trace.calls:
        assert (call.prompt_tokens, call.output_tokens, len(call.blocks)) == (380, 7, 4)
        by_group.setdefault(call.tenant, []).append(call.blocks)
    assert len(by_group) == 3
    for blocks in by_group.values():
        assert len({tuple(ids) for ids in blocks}) == 2
        assert {shared(blocks[0], ids) for ids in blocks} == {2, 4}
    first, second, _ = by_group.values()
    assert shared(first[0], second[0]) == 0


def test_a_constant_ladder_keeps_its_rates() -> None:
    trace = generate("groups:rates=2/10,stage_s=5,arrival=constant")
    times = [call.arrival_s for call in trace.calls]
    assert len(times) == 2 * 5 + 10 * 5
    assert np.diff(times[:10]) == pytest.approx(0.5)
    assert np.diff(times[10:]) == pytest.approx(0.1)


def test_zipf_favours_the_first_groups() -> None:
    trace = generate("groups:groups=20,zipf=1.2,rates=50,stage_s=20")
    counts = Counter(call.tenant for call in trace.calls)
    assert counts["g0"] > 3 * counts["g9"]


def test_an_agents_turn_begins_with_the_turn_before() -> None:
    trace = generate("agents:kinds=1,rates=0.1,stage_s=10,arrival=constant,turns=4")
    assert len(trace.calls) == 4
    assert [call.prompt_tokens for call in trace.calls] == [4_800, 5_800, 6_800, 7_800]
    for before, after in zip(trace.calls, trace.calls[1:], strict=False):
        assert after.arrival_s > before.arrival_s
        assert shared(before.blocks, after.blocks) == len(before.blocks)


def test_siblings_come_in_bursts_on_cold_prefixes() -> None:
    trace = generate("siblings:bursts=3,siblings=4,every_s=100,within_s=1")
    assert [int(call.arrival_s // 100) for call in trace.calls] == [0] * 4 + [1] * 4 + [2] * 4
    one, other, next_burst = (trace.calls[place].blocks for place in (0, 1, 4))
    assert shared(one, other) == 160
    assert shared(one, next_burst) == 0


@pytest.mark.parametrize("text", ["groups:", "agents:rates=1/2", "siblings:bursts=2"])
def test_it_repeats_to_the_bit(text: str) -> None:
    first, second = generate(text), generate(text)
    assert [(c.arrival_s, c.tenant, c.blocks.tolist()) for c in first.calls] == [
        (c.arrival_s, c.tenant, c.blocks.tolist()) for c in second.calls
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("crowds:", "unknown kind of trace 'crowds'; known: groups, agents, siblings"),
        ("groups:group=3", "unknown setting 'group'; known: groups, prompts"),
        ("groups:groups=3.5", "'groups=3.5': takes a whole number"),
        ("groups:groups=0", "'groups=0': takes a whole number"),
        ("groups:rates=1/x", "'rates=1/x': takes numbers"),
        ("groups:rates=", "'rates=': takes numbers"),
        ("groups:stage_s=inf", "'stage_s=inf': takes a number"),
        ("groups:arrival=never", "'arrival=never': takes poisson or constant"),
        ("groups:rates=1000000,stage_s=1000", "too many"),
        ("groups:rates=1e300/1e300,stage_s=1e300", "too many"),
        ("siblings:system=10000000", "too many"),
        ("groups:rates=0.001,stage_s=1,arrival=constant", "makes no request"),
    ],
)
def test_a_bad_description_is_named(text: str, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        generate(text)
