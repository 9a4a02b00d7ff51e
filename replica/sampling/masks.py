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
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=vocab, bitorder="little")
    barred = torch.from_numpy(bits == 0).to(logits.device)
    for one, (row, _) in zip(barred, rows, strict=True):
        logits[row].masked_fill_(one, float("-inf"))
