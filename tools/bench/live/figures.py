"""From samples to figures with confidence intervals.

Rounds are resampled, and requests within each (hierarchical bootstrap, Davison and Hinkley 1997,
3.8): 95 % percentile intervals. Targets got the same requests at the same times, so the same draw
serves them all, and their ratios are of pairs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.bench.client import Sample
from tools.bench.live.play import Played

DRAWS = 1_000
INTERVAL = (2.5, 97.5)
PERCENTILES = (50, 90, 99)
FIGURES = (
    *("ttft_mean_ms", *(f"ttft_p{rank}_ms" for rank in PERCENTILES)),
    *("itl_mean_ms", "e2e_mean_ms", "cached_token_ratio", "slo_share"),
)
"""In the order of `Columns.figures`."""


@dataclass(frozen=True, slots=True)
class Slo:
    """A request is good whose first token, and gaps between tokens in the mean, keep within."""

    ttft_ms: float
    itl_ms: float = math.inf

    def __str__(self) -> str:
        gaps = "" if math.isinf(self.itl_ms) else f", ITL within {self.itl_ms:g} ms"
        return f"TTFT within {self.ttft_ms:g} ms{gaps}"


class Columns:
    """One target's answers as float64 (requests,), nan where a request failed."""

    def __init__(self, samples: Sequence[Sample], slo: Slo) -> None:
        failed = np.array([bool(sample.error) for sample in samples])

        def column(value: Callable[[Sample], float]) -> np.ndarray:
            return np.where(failed, np.nan, np.array([value(s) for s in samples], np.float64))

        self.ttft_ms = column(lambda sample: sample.ttft_ms)
        self.e2e_ms = column(lambda sample: sample.e2e_ms)
        self.itl_ms = column(lambda s: float(np.mean(s.itl_ms)) if s.itl_ms else 0.0)
        self.prompt = column(lambda sample: sample.prompt_tokens)
        self.cached = column(lambda sample: sample.cached_tokens)
        self.good = (self.ttft_ms <= slo.ttft_ms) & (self.itl_ms <= slo.itl_ms)

    def figures(self, draw: np.ndarray) -> np.ndarray:
        """float64 (len(FIGURES),), of the requests at the places `draw`; nan for what none has."""
        ttft_ms = self.ttft_ms[draw]
        served = ~np.isnan(ttft_ms)
        if not served.any():
            return np.array([*[math.nan] * (len(FIGURES) - 1), 0.0])
        ttft_ms, draw_served = ttft_ms[served], draw[served]
        prompt = max(1.0, self.prompt[draw_served].sum())
        return np.array(
            [
                ttft_ms.mean(),
                *np.percentile(ttft_ms, PERCENTILES),
                self.itl_ms[draw_served].mean(),
                self.e2e_ms[draw_served].mean(),
                self.cached[draw_served].sum() / prompt,
                self.good[draw].mean(),
            ]
        )


def figures(
    rounds: dict[str, list[Played]], slo: Slo, seed: int, draws: int = DRAWS
) -> dict[str, Any]:
    """`{target: {figure: {"value", "low", "high"}, "over_first": {...}, counts...}}`."""
    columns = {
        name: Columns([sample for played in of for sample in played.samples], slo)
        for name, of in rounds.items()
    }
    sizes = [len(played.samples) for played in next(iter(rounds.values()))]
    drawn = [_draw(sizes, np.random.default_rng((seed, number))) for number in range(draws)]
    everybody = np.arange(sum(sizes))
    first = next(iter(rounds))
    return {
        name: _of_target(columns[name], columns[first], everybody, drawn) | _counts(rounds[name])
        for name in rounds
    }


def _draw(sizes: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Places, int64, over all rounds' requests one behind the other."""
    starts = np.cumsum([0, *sizes])
    chosen = rng.integers(len(sizes), size=len(sizes))
    return np.concatenate([starts[r] + rng.integers(sizes[r], size=sizes[r]) for r in chosen])


def _of_target(
    of: Columns, first: Columns, everybody: np.ndarray, drawn: Sequence[np.ndarray]
) -> dict[str, Any]:
    value, base = of.figures(everybody), first.figures(everybody)
    values, bases = (np.array([c.figures(draw) for draw in drawn]) for c in (of, first))
    found: dict[str, Any] = _with_intervals(value, values)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = _with_intervals(value / base, values / bases)
    return found | {"over_first": {} if of is first else ratios}


def _with_intervals(value: np.ndarray, draws: np.ndarray) -> dict[str, Any]:
    found = {}
    for place, name in enumerate(FIGURES):
        known = draws[np.isfinite(draws[:, place]), place]
        low, high = np.percentile(known, INTERVAL) if len(known) else (math.nan, math.nan)
        numbers = zip(("value", "low", "high"), (value[place], low, high), strict=True)
        found[name] = {key: _number(float(number)) for key, number in numbers}
    return found


def _number(value: float) -> float | None:
    """None for what there is not: JSON knows no nan."""
    return value if math.isfinite(value) else None


def _counts(rounds: Sequence[Played]) -> dict[str, Any]:
    samples = [sample for played in rounds for sample in played.samples]
    gaps = [gap for sample in samples if not sample.error for gap in sample.itl_ms]
    wall_s = sum(played.wall_s for played in rounds)
    return {
        "itl_p99_ms": float(np.percentile(gaps, 99)) if gaps else None,
        "requests": len(samples),
        "errors": dict(Counter(sample.error for sample in samples if sample.error)),
        "prompt_tokens": sum(sample.prompt_tokens for sample in samples),
        "output_tokens_per_s": sum(sample.completion_tokens for sample in samples) / wall_s,
        "requests_per_replica": dict(sorted(Counter(s.replica for s in samples).items())),
        "sent_late_p99_ms": float(np.percentile([ms for p in rounds for ms in p.late_ms], 99)),
    }
