"""E2: the last words of one life of a replica and the first of the next come in any order."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from events.feed import Feed
from events.memory import MemoryBus
from tests.events.helpers import CLUSTER, MirrorListener, removed, settle, stored
from tests.events.world import World

Message = tuple[str, bytes]


async def said(world: World, first: int, count: int) -> list[Message]:
    """What the present life says while it computes so many blocks, and evicts a few of them."""
    words: list[Message] = []

    def keep(subject: str, payload: bytes) -> tuple[int, ...]:
        words.append((subject, payload))
        return (0,)

    world.hub.fault = keep
    for number in range(first, first + count, 25):
        world.engine.facts += stored(*range(number, number + 25)) + removed(number)
        await world.beat(0.3)
    world.hub.fault = None
    return words


def merged(rng: random.Random, old: Sequence[Message], new: Sequence[Message]) -> list[Message]:
    """Each in its own order; an early, a late, or an even mixture."""
    weight, left, right, order = rng.choice([0.02, 0.5, 0.98]), list(old), list(new), []
    while left or right:
        from_old = left and (not right or rng.random() < weight)
        order.append((left if from_old else right).pop(0))
    return order


@pytest.mark.parametrize("seed", range(8))
async def test_E2_a_late_end_of_one_life_erases_nothing_of_the_next(seed: int) -> None:
    world = World()
    await world.feed.start()
    await world.serve(world.publisher)
    old = await said(world, 0, 100)
    old_boot = world.boot
    world.hub.fault = lambda subject, payload: old.append((subject, payload)) or (0,)
    await world.publisher.close("drained")
    await settle()
    world.publisher = world.new_publisher()
    await world.serve(world.publisher)
    world.hub.fault = None
    new = await said(world, 1_000, 500)

    listener = MirrorListener(check=world.believes_history)
    feed = Feed(MemoryBus(world.hub), CLUSTER, listener, world.clock)
    await feed.start()
    for subject, payload in merged(random.Random(seed), old, new):
        world.hub.publish(subject, payload)
        await settle(3)
    for _ in range(8):
        await world.beat(0.25)
        await feed.sweep()
        await settle()
    assert listener.broken == []
    assert (listener.bits("r0") == world.truth()).all()
    assert listener.present["r0"].boot > old_boot
    assert world.truth().sum() > 1_000
    await feed.close()
    await world.feed.close()
    await world.publisher.close()
