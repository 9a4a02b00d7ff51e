"""A runner over weights with an adapter merged in: the plain reference."""

from __future__ import annotations

from pathlib import Path

from configs.model.adapter import AdapterFile
from configs.model.card import ModelCard
from configs.model.weights import open_weights
from replica.runner.runner import ModelRunner
from tests.fakes.adapters import MergedWeights
from tests.replica.models.plain import CPU, plain_llama


def merged_runner(card: ModelCard, adapter: Path, block_tokens: int = 8) -> ModelRunner:
    """Plain torch, float32, no adapters."""
    shape = card.shape
    source = MergedWeights(open_weights(card.path), AdapterFile(adapter, shape))
    model, pool = plain_llama(source, shape, 64, block_tokens)
    context = shape.context_tokens
    return ModelRunner(
        model, pool, vocab=shape.vocab, context_tokens=context, device=CPU, threads=1
    )
