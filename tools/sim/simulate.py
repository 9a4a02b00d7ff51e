"""One trace under several policies: the settings and each policy's figures, as they are written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from router.policies import POLICIES
from tools.sim.call import Trace
from tools.sim.capacity import capacity
from tools.sim.generate import KINDS, generate
from tools.sim.settings import CLAIRVOYANT, SOUGHT, Settings
from tools.sim.summary import summary
from tools.sim.traces import read_trace
from tools.sim.world import World

OURS = "warmroute"
EVERY = (OURS, *sorted(POLICIES.keys() - {OURS}), CLAIRVOYANT)
"""Ours first, the bound last."""


def load_trace(text: str, keep_bins: bool = False) -> Trace:
    """A file's trace (as `read_trace`), or the generated one that the text describes. Raises
    TraceError."""
    if text.partition(":")[0] in KINDS and not Path(text).exists():
        return generate(text)
    return read_trace(Path(text), keep_bins)


def figures(trace: Trace, settings: Settings, slo_ttft_s: float) -> dict[str, Any]:
    """Of one policy."""
    return summary(World(trace, settings).run(), slo_ttft_s)


def simulate(
    trace: Trace,
    base: Settings,
    policies: Iterable[str],
    slo_ttft_s: float,
    capacity_slo_s: float | None = None,
) -> dict[str, Any]:
    """`{"settings": ..., "policies": {name: figures}}`; `base` says all but the policy. With an
    objective for the p90 TTFT each policy's capacity is measured too."""
    measured = {}
    for name in policies:
        settings = replace(base, policy=name)
        measured[name] = figures(trace, settings, slo_ttft_s)
        if capacity_slo_s is not None:
            measured[name] |= capacity_figures(trace, settings, capacity_slo_s)
    said = described(trace, base, slo_ttft_s) | {"capacity_slo_s": capacity_slo_s}
    return {"settings": said, "policies": measured}


def seek_capacity(
    trace: Trace, base: Settings, policies: Iterable[str], slo_s: float
) -> dict[str, Any]:
    """As `simulate`, but for nothing but each policy's capacity."""
    measured = {
        name: capacity_figures(trace, replace(base, policy=name), slo_s) for name in policies
    }
    sought = {"load": SOUGHT, "capacity_slo_s": slo_s}
    return {"settings": described(trace, base, slo_s) | sought, "policies": measured}


def capacity_figures(trace: Trace, settings: Settings, slo_s: float) -> dict[str, Any]:
    """At which load the policy still keeps the p90 TTFT below the objective; what was tried, from
    the load in the settings on."""
    found = capacity(
        lambda load: World(trace, replace(settings, load=load)).ttft_within_s(0.9, slo_s),
        settings.load or 1.0,
    )
    return {"capacity_load": found.load, "capacity_curve": found.curve}


def described(trace: Trace, settings: Settings, slo_ttft_s: float) -> dict[str, Any]:
    """All that a run depends on, its policy apart. `load` null: the trace's own times."""
    bus = settings.bus
    return {
        "trace": trace.name,
        "requests": len(trace.calls),
        "block_tokens": trace.block_tokens,
        "replicas": len(settings.names),
        "prefill": settings.prefill,
        "decode": settings.decode,
        "load": settings.load,
        "device": settings.device.name,
        "device_source": settings.device.source,
        "kv_tokens": settings.kv_tokens,
        "tiers": [asdict(tier) for tier in settings.tiers],
        "eviction": settings.eviction,
        "itl_target_ms": settings.itl_target_ms,
        "slo_ttft_s": slo_ttft_s,
        "lag_ms": 1e3 * bus.lag_s,
        "jitter_ms": 1e3 * bus.jitter_s,
        "loss": bus.loss,
        "speeds": dict(settings.speeds),
        "muted": list(settings.muted),
        "faults": [str(fault) for fault in settings.faults],
        "seed": settings.seed,
    }
