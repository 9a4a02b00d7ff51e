"""What grammars allow, as masks over the logits: first in the chain, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from replica.sched.plan import SampleSpec

_WORD_BITS = 32


def apply_grammars(logits: Tensor, specs: Sequence[SampleSpec]) -> None:
    """Take what is not allowed out of float32 logits [rows, vocab], in place. A row whose grammar
    fails is left with nothing to choose from."""
    rows = [(row, spec.grammar) for row, spec in enumerate(specs) if spec.grammar is not None]
    if not rows:
        return
    vocab = logits.shape[1]
    words = np.zeros((len(rows), -(-vocab // _WORD_BITS)), np.int32)
    for mask, (_, grammar) in zip(words, rows, strict=True):
        grammar.fill(mask)
    index = torch.tensor([row for row, _ in rows], device=logits.device)
    barred = ~_bits(torch.from_numpy(words).to(logits.device), vocab)
    logits[index] = logits[index].masked_fill(barred, float("-inf"))


def _bits(words: Tensor, count: int) -> Tensor:
    """int32 [rows, words] to bool [rows, count], the lowest bit of a word first."""
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, :count].bool()
