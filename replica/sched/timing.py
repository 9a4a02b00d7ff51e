"""How long steps take here: the replica's own cost model, learnt online from its own steps.

Two small linear models, fitted by recursive least squares with a slow forgetting factor. Decode is
fitted from steps that only decode; prefill from all other steps, after the decode rows' share is
taken off, so mixed steps count too. Without data both say something sane, with confidence 0.
"""

from __future__ import annotations

import numpy as np

from events.load import DecodeFit, PrefillFit
from replica.sched.plan import ExecutionPlan

FORGETTING = 0.995
DEFAULT_PREFILL = PrefillFit(a=5.0, b=1.0, c=0.0, confidence=0.0)
DEFAULT_DECODE = DecodeFit(base=40.0, per_row=2.0, per_context=0.0, confidence=0.0)
_PREFILL_SCALE = (1.0, 1e2, 1e5)
_DECODE_SCALE = (1.0, 1e1, 1e4)
_WARM_STEPS = 8
_OUTLIER = 4.0
_MAX_SPREAD = 1e4


class LinearFit:
    """y = weights . x with weights that are never negative; remembers how well it predicts."""

    def __init__(self, weights: tuple[float, ...], scale: tuple[float, ...]) -> None:
        self._scale = np.array(scale)
        self._weights = np.array(weights) * self._scale
        self._spread = np.eye(len(scale)) * 1e2
        self.steps = 0
        self.relative_error = 1.0

    @property
    def weights(self) -> tuple[float, ...]:
        """In the units of the features."""
        return tuple(float(weight) for weight in self._weights / self._scale)

    @property
    def confidence(self) -> float:
        """0 without data, towards 1 with many steps that were predicted well."""
        return self.steps / (self.steps + 10.0) / (1.0 + self.relative_error)

    def observe(self, features: tuple[float, ...], value: float) -> None:
        """One measurement. A single outlier (a paused process, a first call) moves it little."""
        x = np.array(features) / self._scale
        predicted = float(self._weights @ x)
        surprise = value - predicted
        if self.steps >= _WARM_STEPS:
            bound = _OUTLIER * max(abs(predicted) * self.relative_error, 0.05 * abs(predicted), 0.1)
            surprise = min(max(surprise, -bound), bound)
        gain = self._spread @ x
        gain /= FORGETTING + float(x @ gain)
        self._weights = np.maximum(self._weights + gain * surprise, 0.0)
        self._spread -= np.outer(gain, x @ self._spread)
        if float(np.trace(self._spread)) < _MAX_SPREAD:
            self._spread /= FORGETTING
        self._score(abs(value - predicted) / max(value, 0.1))

    def _score(self, error: float) -> None:
        share = max(0.05, 1.0 / (self.steps + 1))
        self.relative_error += share * (min(error, 1.0) - self.relative_error)
        self.steps += 1


class Timing:
    """What the replica publishes as its own speed. Times in ms."""

    def __init__(self) -> None:
        prefill, decode = DEFAULT_PREFILL, DEFAULT_DECODE
        self._prefill = LinearFit((prefill.a, prefill.b, prefill.c), _PREFILL_SCALE)
        self._decode = LinearFit((decode.base, decode.per_row, decode.per_context), _DECODE_SCALE)
        self.step_ms = 0.0
        self.steps = 0

    @property
    def prefill(self) -> PrefillFit:
        """Today's prefill model."""
        a, b, c = self._prefill.weights
        return PrefillFit(a=a, b=b, c=c, confidence=self._prefill.confidence)

    @property
    def decode(self) -> DecodeFit:
        """Today's decode model."""
        base, per_row, per_context = self._decode.weights
        return DecodeFit(
            base=base,
            per_row=per_row,
            per_context=per_context,
            confidence=self._decode.confidence,
        )

    def observe(self, plan: ExecutionPlan, device_ms: float) -> None:
        """One executed step."""
        self.steps += 1
        self.step_ms += (device_ms - self.step_ms) * (0.1 if self.steps > 1 else 1.0)
        rows = context = new = pairs = 0
        for row in plan.rows:
            count = len(row.token_ids)
            if count == 1:
                rows += 1
                context += row.start
            else:
                new += count
                pairs += row.start * count + count * (count + 1) // 2
        if not new:
            self._decode.observe((1.0, rows, context), device_ms)
            return
        _, per_row, per_context = self._decode.weights
        share = per_row * rows + per_context * context if self._decode.steps else 0.0
        self._prefill.observe((1.0, new, pairs), max(device_ms - share, 0.0))
