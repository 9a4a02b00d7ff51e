"""One trace under several policies: the settings and each policy's figures, as they are written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from router.policies import POLICIES
from tools.sim.call import Trace
from tools.sim.generate import KINDS, generate
from tools.sim.settings import CLAIRVOYANT, Settings
from tools.sim.summary import summary
from tools.sim.traces import read_trace
from tools.sim.world import World

OURS = "warmroute"
EVERY = (OURS, *sorted(POLICIES.keys() - {OURS}), CLAIRVOYANT)
"""Ours first, the bound last."""


def load_trace(text: str) -> Trace:
    """A file's trace, or the generated one that the text describes. Raises TraceError."""
    kind = text.partition(":")[0]
    return generate(text) if kind in KINDS and not Path(text).exists() else read_trace(Path(text))


def figures(trace: Trace, settings: Settings, slo_ttft_s: float) -> dict[str, Any]:
    """Of one policy."""
    return summary(World(trace, settings).run(), slo_ttft_s)


def simulate(
    trace: Trace, base: Settings, policies: Iterable[str], slo_ttft_s: float
) -> dict[str, Any]:
    """`{"settings": ..., "policies": {name: figures}}`; `base` says all but the policy."""
    return {
        "settings": described(trace, base, slo_ttft_s),
        "policies": {
            name: figures(trace, replace(base, policy=name), slo_ttft_s) for name in policies
        },
    }


def described(trace: Trace, settings: Settings, slo_ttft_s: float) -> dict[str, Any]:
    """All that a run depends on, its policy apart. `load` null: the trace's own times."""
    bus = settings.bus
    return {
        "trace": trace.name,
        "requests": len(trace.calls),
        "block_tokens": trace.block_tokens,
        "replicas": settings.replicas,
        "load": settings.load,
        "device": settings.device.name,
        "device_source": settings.device.source,
        "kv_tokens": settings.kv_tokens,
        "slo_ttft_s": slo_ttft_s,
        "lag_ms": 1e3 * bus.lag_s,
        "jitter_ms": 1e3 * bus.jitter_s,
        "loss": bus.loss,
        "speeds": dict(settings.speeds),
        "muted": list(settings.muted),
        "faults": [str(fault) for fault in settings.faults],
        "seed": settings.seed,
    }
