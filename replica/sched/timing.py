"""How long steps take here: the replica's own cost model, learnt online from its own steps.

Two small linear models, fitted by least squares over the last few hundred steps. Decode is
fitted from steps that only decode; prefill from all other steps, after the decode rows' share is
taken off, so mixed steps count too. Without data both say something sane, with confidence 0.
"""

from __future__ import annotations

from functools import cache
from itertools import chain, combinations

import numpy as np

from events.load import DecodeFit, PrefillFit
from replica.sched.chunks import SURE_CONFIDENCE, StepModel
from replica.sched.plan import ExecutionPlan

FORGETTING = 0.995
DEFAULT_PREFILL = PrefillFit(a=5.0, b=1.0, c=0.0, confidence=0.0)
DEFAULT_DECODE = DecodeFit(base=40.0, per_row=2.0, per_context=0.0, confidence=0.0)
_PREFILL_SCALE = (1.0, 1e2, 1e5)
_DECODE_SCALE = (1.0, 1e1, 1e4)
_WARM_STEPS = 8
_OUTLIER = 4.0
_SOLVE_EVERY_STEPS = 8
_RIDGE = 0.01


class LinearFit:
    """y = weights . x with weights that are never negative; remembers how well it predicts.

    Solved anew from what the steps add up to, not corrected step by step: holding weights at zero
    would make such corrections drift without bound.
    """

    def __init__(self, weights: tuple[float, ...], scale: tuple[float, ...]) -> None:
        self._scale = np.array(scale)
        self._weights = self._guess = np.array(weights) * self._scale
        self._moment = np.zeros((len(scale), len(scale)))
        self._pull = np.zeros(len(scale))
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
        self._moment = FORGETTING * self._moment + np.outer(x, x)
        self._pull = FORGETTING * self._pull + x * (predicted + surprise)
        if self.steps < _WARM_STEPS or self.steps % _SOLVE_EVERY_STEPS == 0:
            # What the steps leave open stays near the first guess.
            ridge = _RIDGE * np.eye(len(x))
            self._weights = _solve(self._moment + ridge, self._pull + _RIDGE * self._guess)
        self._score(abs(value - predicted) / max(value, 0.1))

    def _score(self, error: float) -> None:
        share = max(0.05, 1.0 / (self.steps + 1))
        self.relative_error += share * (min(error, 1.0) - self.relative_error)
        self.steps += 1


def _solve(moment: np.ndarray, pull: np.ndarray) -> np.ndarray:
    """The w >= 0 with the least w.moment.w / 2 - pull.w. There are few weights, so every choice of
    those that are zero is tried."""
    best, least = np.zeros(len(pull)), 0.0
    for keep in _choices(len(pull)):
        weights = np.linalg.solve(moment[np.ix_(keep, keep)], pull[list(keep)])
        if weights.min() < 0.0:
            continue
        if len(keep) == len(pull):
            return weights
        cost = -0.5 * float(weights @ pull[list(keep)])
        if cost < least:
            least = cost
            best = np.zeros(len(pull))
            best[list(keep)] = weights
    return best


@cache
def _choices(count: int) -> tuple[tuple[int, ...], ...]:
    """Every non-empty subset of the weights, the whole first."""
    sizes = range(count, 0, -1)
    return tuple(chain.from_iterable(combinations(range(count), size) for size in sizes))


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

    @property
    def sure_error(self) -> float | None:
        """How far off the prefill model is, as a share; None while next to nothing was learnt."""
        sure = self._prefill.confidence >= SURE_CONFIDENCE
        return self._prefill.relative_error if sure else None

    def model(self) -> StepModel:
        """Both models, and how far off the prefill model is on average."""
        return StepModel(self.prefill, self.decode, self._prefill.relative_error)

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
