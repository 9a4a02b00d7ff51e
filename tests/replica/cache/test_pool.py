"""Blocks change state as the design says, are released once, and wait behind the fence."""

from __future__ import annotations

import pytest

from events.errors import InvariantError
from replica.cache.pool import BlockPool, BlockState


def counts(pool: BlockPool) -> list[int]:
    return [pool.count(state) for state in BlockState]


def test_every_state_is_counted() -> None:
    pool = BlockPool(4)
    first, second = pool.take(2)
    pool.publish(first)
    assert counts(pool) == [2, 1, 1, 0, 0]
    assert pool.unshare([first]) == [0]
    assert counts(pool) == [2, 1, 0, 1, 0]
    assert pool.share([first]) == [0]
    assert pool.share([first]) == []
    assert pool.refs(first) == 2
    assert not pool.unshare([first])
    pool.free(second)
    assert counts(pool) == [3, 0, 1, 0, 0]


def test_a_second_release_is_an_error() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.free(block)
    with pytest.raises(InvariantError):
        pool.free(block)
    with pytest.raises(InvariantError):
        pool.unshare([block])


def test_a_block_in_use_can_not_be_freed_or_published_twice() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.publish(block)
    with pytest.raises(InvariantError):
        pool.free(block)
    with pytest.raises(InvariantError):
        pool.publish(block)


def test_more_than_there_is_can_not_be_taken() -> None:
    pool = BlockPool(2)
    with pytest.raises(InvariantError):
        pool.take(3)
    assert sorted(pool.take(2)) == [0, 1]


def test_what_is_freed_during_a_plan_is_free_after_its_commit() -> None:
    pool = BlockPool(3)
    taken = pool.take(3)
    pool.raise_fence(1)
    pool.free(taken[0])
    assert counts(pool) == [0, 2, 0, 0, 1]
    pool.raise_fence(2)
    pool.free(taken[1])
    pool.lower_fence(1)
    assert counts(pool) == [1, 1, 0, 0, 1]
    pool.lower_fence(2)
    pool.free(taken[2])
    assert counts(pool) == [3, 0, 0, 0, 0]


def test_plans_go_up_and_come_back_once() -> None:
    pool = BlockPool(1)
    pool.raise_fence(1)
    with pytest.raises(InvariantError):
        pool.raise_fence(1)
    pool.lower_fence(1)
    with pytest.raises(InvariantError):
        pool.lower_fence(1)
