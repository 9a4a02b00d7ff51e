"""The paged forward pass against a dense one, for every variant of the family."""

from __future__ import annotations

import pytest
import torch

from configs.model.shape import ModelShape
from replica.models.llama import Llama
from replica.runner.batch import build_batch
from replica.runner.pool import KVPool
from replica.sched.plan import ChildId, PlanRow
from tests.replica.models.plain import CPU, plain_llama
from tests.replica.models.weights import RandomWeights, dense_logits, small_shape

VARIANTS = {
    "llama": small_shape(),
    "own head": small_shape(tied_head=False),
    "biases": small_shape(arch="qwen2", qkv_bias=True),
    "head norms": small_shape(arch="qwen3", qk_norm=True),
}


def build(source: RandomWeights) -> tuple[Llama, KVPool]:
    return plain_llama(source, source.shape, 16, 4)


def run(model: Llama, pool: KVPool, rows: list[PlanRow], shape: ModelShape) -> torch.Tensor:
    batch = build_batch(
        rows,
        blocks=pool.blocks,
        block_tokens=pool.block_tokens,
        context_tokens=shape.context_tokens,
        vocab=shape.vocab,
        device=CPU,
    )
    with torch.inference_mode():
        return model.logits(model.forward(batch, pool.layers))


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_dense_pass(variant: str) -> None:
    source = RandomWeights(VARIANTS[variant])
    model, pool = build(source)
    tokens = tuple((7 * index) % 90 for index in range(23))
    wanted = dense_logits(source, list(tokens))
    blocks = (3, 9, 1, 15, 0, 7)
    for start, end in ((0, 10), (10, 11), (11, 22), (22, 23)):
        row = PlanRow(ChildId(1), 0, start, tokens[start:end], blocks, None)
        logits = run(model, pool, [row], source.shape)
        torch.testing.assert_close(logits[0].double(), wanted[end - 1], atol=1e-4, rtol=1e-4)


def test_rows_side_by_side_equal_rows_alone() -> None:
    source = RandomWeights(small_shape())
    model, pool = build(source)
    prompts = [(1, 2, 3), (4,), tuple(range(5, 17))]
    rows = [
        PlanRow(ChildId(index), 0, 0, prompt, (3 * index, 3 * index + 1, 3 * index + 2), None)
        for index, prompt in enumerate(prompts)
    ]
    rows.sort(key=lambda row: len(row.token_ids) > 1)
    logits = run(model, pool, rows, source.shape)
    for row, found in zip(rows, logits, strict=True):
        wanted = dense_logits(source, list(row.token_ids))[-1]
        torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)
