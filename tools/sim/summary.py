"""A run in figures. Times in s unless the name says ms; shares are of 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from tools.sim.record import Record
from tools.sim.run import Run

SLO_TTFT_S = 2.0
"""A request that begins to answer within this counts as good."""


def _times(name: str, values: Sequence[float]) -> dict[str, float]:
    array = np.array(values or [0.0])
    return {
        f"{name}_mean_s": float(array.mean()),
        f"{name}_p50_s": float(np.quantile(array, 0.5)),
        f"{name}_p90_s": float(np.quantile(array, 0.9)),
        f"{name}_p99_s": float(np.quantile(array, 0.99)),
    }


def _percentiles(values: Sequence[float]) -> list[float]:
    """From the least to the largest in hundredths of the requests: 101 times."""
    return [round(float(at), 6) for at in np.quantile(values or [0.0], np.linspace(0, 1, 101))]


def _spread(values: Sequence[float]) -> float:
    """The largest over the mean; 1 is even."""
    mean = sum(values) / max(1, len(values))
    return max(values, default=0.0) / mean if mean else 1.0


def _jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 is even, 1/n is all to one."""
    squares = len(values) * sum(value * value for value in values)
    return sum(values) ** 2 / squares if squares else 1.0


def _tenants(records: Sequence[Record]) -> list[float]:
    """The tenants' mean times to first token."""
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for record in records:
        times[record.tenant] += record.ttft_s
        counts[record.tenant] += 1
    return [times[name] / counts[name] for name in counts]


def _replicas(run: Run, records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """What each of them did."""
    requests = Counter(record.replica for record in records)
    return {
        name: {"busy_share": busy_s / max(1e-9, run.span_s), "requests": requests[name]}
        for name, busy_s in run.busy_s.items()
    }


def summary(run: Run, slo_ttft_s: float = SLO_TTFT_S) -> dict[str, Any]:
    """The figures of one policy."""
    records = run.records
    served = [record for record in records if not record.failed]
    prompt = sum(record.prompt_tokens for record in served)
    good = sum(record.ttft_s <= slo_ttft_s for record in served)
    tenants = _tenants(served)
    return {
        "cached_token_ratio": sum(r.cached_tokens for r in served) / max(1, prompt),
        **_times("ttft", [record.ttft_s for record in served]),
        **_times("e2e", [record.e2e_s for record in served]),
        "itl_p99_ms": run.itl_p99_ms,
        "slo_ttft_s": slo_ttft_s,
        "slo_share": good / max(1, len(records)),
        "goodput_per_s": good / max(1e-9, run.span_s),
        "moved_gbytes": 1e-9 * (run.fetched_bytes + run.written_bytes),
        "fetched_gbytes": 1e-9 * run.fetched_bytes,
        "max_over_mean_load": _spread(list(run.busy_s.values())),
        "max_over_mean_tenant_ttft": _spread(tenants),
        "jain_tenant_ttft": _jain(tenants),
        "requests": len(records),
        "failed": len(records) - len(served),
        "preemptions": run.preemptions,
        "digest_repairs": run.repairs,
        "requests_per_s": run.rate_per_s,
        "ttft_percentiles_s": _percentiles([record.ttft_s for record in served]),
        "replicas": _replicas(run, records),
    }
