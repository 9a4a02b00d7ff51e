"""Which time models to believe: a replica's own, in so far as it is confident, else its pool's.

Published fits are only hints from the wire: what is not finite or not sane is not used.
"""

from __future__ import annotations

from math import isfinite

from events.load import DecodeFit, PrefillFit, ReplicaLoad

CPU_PREFILL = PrefillFit(5.0, 1.0, 0.0, 0.0)
GPU_PREFILL = PrefillFit(5.0, 0.05, 0.0, 0.0)
CPU_DECODE = DecodeFit(50.0, 3.0, 0.0, 0.0)
GPU_DECODE = DecodeFit(10.0, 0.1, 0.0, 0.0)
MAX_COEFFICIENT = 1e6
PRIOR_RATE = 0.05


class PoolPrior:
    """What a replica of this pool is taken for before it knows itself: a running mean of the
    confident ones, from a guess by device at first."""

    def __init__(self, device: str) -> None:
        cpu = device.startswith("cpu")
        self.prefill = CPU_PREFILL if cpu else GPU_PREFILL
        self.decode = CPU_DECODE if cpu else GPU_DECODE

    def learn(self, load: ReplicaLoad) -> None:
        """Take in one replica's published fits."""
        if _sane(load.prefill) and load.prefill.b > 0:
            self.prefill = blend_prefill(self.prefill, load.prefill, PRIOR_RATE)
        if _sane(load.decode):
            self.decode = blend_decode(self.decode, load.decode, PRIOR_RATE)

    def fits(self, load: ReplicaLoad | None) -> tuple[PrefillFit, DecodeFit]:
        """The fits to use for a replica with this report."""
        if load is None:
            return self.prefill, self.decode
        prefill, decode = self.prefill, self.decode
        if _sane(load.prefill) and load.prefill.b > 0:
            prefill = blend_prefill(prefill, load.prefill, 1.0)
        if _sane(load.decode):
            decode = blend_decode(decode, load.decode, 1.0)
        return prefill, decode


def _sane(fit: PrefillFit | DecodeFit) -> bool:
    values = (
        (fit.a, fit.b, fit.c)
        if isinstance(fit, PrefillFit)
        else (fit.base, fit.per_row, fit.per_context)
    )
    return isfinite(fit.confidence) and all(
        isfinite(value) and abs(value) <= MAX_COEFFICIENT for value in values
    )


def blend_prefill(prior: PrefillFit, fit: PrefillFit, rate: float) -> PrefillFit:
    """From `prior` towards `fit`, by its confidence times `rate`."""
    weight = rate * min(1.0, max(0.0, fit.confidence))
    return PrefillFit(
        a=prior.a + weight * (fit.a - prior.a),
        b=prior.b + weight * (fit.b - prior.b),
        c=prior.c + weight * (fit.c - prior.c),
        confidence=fit.confidence,
    )


def blend_decode(prior: DecodeFit, fit: DecodeFit, rate: float) -> DecodeFit:
    """From `prior` towards `fit`, by its confidence times `rate`."""
    weight = rate * min(1.0, max(0.0, fit.confidence))
    return DecodeFit(
        base=prior.base + weight * (fit.base - prior.base),
        per_row=prior.per_row + weight * (fit.per_row - prior.per_row),
        per_context=prior.per_context + weight * (fit.per_context - prior.per_context),
        confidence=fit.confidence,
    )
