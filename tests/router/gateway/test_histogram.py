"""Our histogram against the library's own: the same samples, but for when it was made."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Plain

from router.telemetry.histogram import Histogram

BOUNDS = (0.001, 0.25, 1.0)


@given(st.lists(st.sampled_from([0.0, 0.001, 0.0011, 0.2, 0.25, 1.0, 1.5]), max_size=20))
def test_the_samples_are_those_of_the_library(values: list[float]) -> None:
    plain = Plain("gap", "Gaps", buckets=BOUNDS, registry=CollectorRegistry())
    ours = Histogram("gap", "Gaps", BOUNDS)
    for value in values:
        plain.observe(value)
        ours.observe(value)
    wanted = {
        (sample.name, *sample.labels.items()): sample.value
        for family in plain.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    found = {
        (sample.name, *sample.labels.items()): sample.value
        for family in ours.collect()
        for sample in family.samples
    }
    assert found == wanted
