"""Changes to single logits before sampling: suppressed ids, bad words, bias, penalties.

Each is gathered for the whole batch as (row, id, number) and applied in one indexed operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from events.request import SamplingParams
from replica.sched.plan import SampleSpec


def has_edits(spec: SampleSpec) -> bool:
    """Whether `apply_edits` would change this row."""
    params = spec.params
    return bool(spec.suppress_ids or params.bad_words or params.logit_bias) or _has_penalties(
        params
    )


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def apply_edits(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    """Change float32 logits [rows, vocab] in place, in the order of the sampling chain."""
    _suppress(logits, specs)
    _bias(logits, specs)
    if any(_has_penalties(spec.params) for spec in specs):
        _repetition(logits, specs)
        _presence_and_frequency(logits, specs)


class _Cells:
    """Cells of the logits and one number for each."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._rows: list[np.ndarray] = []
        self._ids: list[np.ndarray] = []
        self._numbers: list[np.ndarray] = []

    def add(self, row: int, ids: np.ndarray, numbers: np.ndarray) -> None:
        """Ids outside the vocabulary can't be sampled anyway and are left out."""
        inside = (ids >= 0) & (ids < self._vocab)
        self._rows.append(np.full(int(inside.sum()), row))
        self._ids.append(ids[inside])
        self._numbers.append(numbers[inside])

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """rows, ids (int64) and numbers (float32)."""
        return (
            torch.from_numpy(np.concatenate(self._rows)).to(device),
            torch.from_numpy(np.concatenate(self._ids)).to(device),
            torch.from_numpy(np.concatenate(self._numbers).astype(np.float32)).to(device),
        )


def _gather(
    logits: Tensor, cells: Iterator[tuple[int, np.ndarray, np.ndarray]]
) -> tuple[Tensor, Tensor, Tensor] | None:
    found = _Cells(logits.shape[1])
    empty = True
    for row, ids, numbers in cells:
        found.add(row, ids, numbers)
        empty = False
    return None if empty else found.tensors(logits.device)


def _barred(spec: SampleSpec) -> list[int]:
    """Suppressed ids, and those that would complete a bad word."""
    done = spec.output_ids
    ends = (
        word[-1] for word in spec.params.bad_words if done[len(done) - len(word) + 1 :] == word[:-1]
    )
    return [*spec.suppress_ids, *ends]


def _suppress(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    cells = _gather(
        logits,
        (
            (row, np.array(ids), np.zeros(len(ids)))
            for row, spec in enumerate(specs)
            if (ids := _barred(spec))
        ),
    )
    if cells is not None:
        rows, ids, _ = cells
        logits[rows, ids] = float("-inf")


def _bias(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    cells = _gather(
        logits,
        (
            (row, np.array(list(bias)), np.array(list(bias.values())))
            for row, spec in enumerate(specs)
            if (bias := spec.params.logit_bias)
        ),
    )
    if cells is not None:
        rows, ids, amounts = cells
        logits[rows, ids] += amounts


def _repetition(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    """Ids of prompt and output: positive logits are divided, negative ones multiplied."""

    def seen() -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        for row, spec in enumerate(specs):
            if spec.params.repetition_penalty != 1.0:
                ids = np.unique(np.array(spec.prompt_ids + spec.output_ids, np.int64))
                yield row, ids, np.full(len(ids), spec.params.repetition_penalty)

    cells = _gather(logits, seen())
    if cells is not None:
        rows, ids, penalty = cells
        values = logits[rows, ids]
        logits[rows, ids] = torch.where(values > 0, values / penalty, values * penalty)


def _presence_and_frequency(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    """Ids of the output: minus presence once, minus frequency for each occurrence."""

    def made() -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        for row, spec in enumerate(specs):
            params = spec.params
            if params.presence_penalty or params.frequency_penalty:
                ids, counts = np.unique(np.array(spec.output_ids, np.int64), return_counts=True)
                yield row, ids, params.presence_penalty + params.frequency_penalty * counts

    cells = _gather(logits, made())
    if cells is not None:
        rows, ids, penalty = cells
        logits[rows, ids] -= penalty
