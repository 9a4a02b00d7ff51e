"""From plan rows to tensors."""

from __future__ import annotations

import pytest
import torch

from replica.runner.batch import ForwardBatch, PlanError, build_batch, row_order
from replica.sched.plan import ChildId, PlanRow


def row(start: int, tokens: tuple[int, ...], blocks: tuple[int, ...]) -> PlanRow:
    return PlanRow(ChildId(1), 0, start, tokens, blocks, None)


def batch(*rows: PlanRow) -> ForwardBatch:
    return build_batch(
        rows, blocks=10, block_tokens=4, context_tokens=32, vocab=100, device=torch.device("cpu")
    )


def test_single_tokens_come_first_in_a_stable_order() -> None:
    rows = [row(0, (1, 2), (0,)), row(4, (3,), (1, 2)), row(0, (4, 5), (3,)), row(0, (6,), (4,))]
    assert row_order(rows) == [1, 3, 0, 2]


def test_what_a_batch_holds() -> None:
    built = batch(row(5, (9,), (7, 2)), row(3, (1, 2, 3), (4, 8)))
    assert built.token_ids.tolist() == [9, 1, 2, 3]
    assert built.positions.tolist() == [5, 3, 4, 5]
    assert built.slots.tolist() == [2 * 4 + 1, 4 * 4 + 3, 8 * 4, 8 * 4 + 1]
    assert built.block_tables.tolist() == [[7, 2], [4, 8]]
    assert built.starts.tolist() == built.host_starts.tolist() == [0, 1, 4]
    assert built.contexts.tolist() == built.host_contexts.tolist() == [6, 6]
    assert built.last.tolist() == [0, 3]


def test_tables_are_filled_up_with_the_dump_and_hold_no_unused_block() -> None:
    built = batch(row(0, (1,), (5, 6)), row(8, (1, 2), (0, 1, 2)))
    assert built.block_tables.tolist() == [[5, 10, 10], [0, 1, 2]]


def test_last_only_keeps_one_token_of_each_row() -> None:
    built = batch(row(5, (9,), (7, 2)), row(3, (1, 2, 3), (4, 8))).last_only()
    assert built.token_ids.tolist() == [9, 3]
    assert built.positions.tolist() == [5, 5]
    assert built.starts.tolist() == [0, 1, 2]
    assert built.last.tolist() == [0, 1]
    assert built.contexts.tolist() == [6, 6]


@pytest.mark.parametrize(
    "bad",
    [
        row(0, (), (0,)),
        row(-1, (1,), (0,)),
        row(30, (1, 2, 3), tuple(range(9))),
        row(2, (1, 2, 3), (0,)),
        row(0, (1,), (10,)),
        row(0, (1,), (-1,)),
        row(0, (100,), (0,)),
        row(0, (-1,), (0,)),
    ],
    ids=["empty", "before", "too long", "uncovered", "dump", "negative", "vocab", "token"],
)
def test_broken_rows_are_refused(bad: PlanRow) -> None:
    with pytest.raises(PlanError):
        batch(row(0, (1,), (3,)), bad)
