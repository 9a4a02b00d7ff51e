"""The queue's bounds, deadlines and refusals, in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from events.errors import UserError
from events.peer import PeerState
from router.cluster.use import SharedUse
from router.tenancy.limits import Limits
from router.tenancy.tags import TenantTags
from router.tenancy.tenants import Tenants
from tests.router.kit import KEY
from tests.router.waiting.fleet import Fleet, job_of, p95, tenant, unique

ALICE, BOB = tenant("alice"), tenant("bob")


async def gone(*tasks: asyncio.Task) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def refused(fleet: Fleet, who=ALICE, tokens: int = 1_024) -> UserError:
    with pytest.raises(UserError) as caught:
        await fleet.ask(who, unique(tokens))
    assert caught.value.error.status == 429
    assert 1 <= caught.value.error.retry_after_s <= 60
    return caught.value


async def test_O1_who_leaves_the_queue_leaves_no_trace() -> None:
    async with Fleet(1) as fleet:
        tasks = [asyncio.create_task(fleet.ask(ALICE, unique(2_048))) for _ in range(8)]
        await asyncio.sleep(1)
        assert fleet.queue.requests == 7
        await gone(*tasks[1:])
        assert (fleet.queue.requests, fleet.queue.tokens) == (0, 0)
        assert not fleet.queue.waiting_pools
        await tasks[0]
        assert await fleet.ask(BOB, unique(16)) < 1


async def test_O4_the_queue_is_bounded_in_requests_and_one_tenant_at_half() -> None:
    async with Fleet(1, max_queued_requests=10) as fleet:
        tasks = [asyncio.create_task(fleet.ask(ALICE, unique(2_048))) for _ in range(6)]
        await asyncio.sleep(1)
        await refused(fleet)
        assert fleet.queue.held.refused == {"full": 1}
        tasks += [asyncio.create_task(fleet.ask(BOB, unique(2_048))) for _ in range(5)]
        await asyncio.sleep(0)
        assert fleet.queue.requests == 10
        await refused(fleet, tenant("carol"))
        await gone(*tasks)


async def test_O4_a_tenants_half_is_one_over_all_routers() -> None:
    async with Fleet(1, max_queued_requests=10) as fleet:
        peers = fleet.world.brain.peers
        use = SharedUse(TenantTags(KEY, Tenants(KEY, [])), Limits(), fleet.queue, peers)
        tasks = [asyncio.create_task(fleet.ask(ALICE, unique(2_048))) for _ in range(4)]
        await asyncio.sleep(1)
        (here,) = use.all_inside()
        assert (here.requests, here.queued) == (0, 3)
        assert here.queued_tokens == fleet.queue.tokens
        peers.hear("b", 1, 1, PeerState(inside=(structs.replace(here, queued=2),)), 0.0)
        await refused(fleet)
        peers.hear("b", 1, 2, PeerState(inside=()), 0.0)
        tasks.append(asyncio.create_task(fleet.ask(ALICE, unique(2_048))))
        await asyncio.sleep(0)
        assert fleet.queue.requests == 4
        await gone(*tasks)
        assert use.all_inside() == ()


async def test_O4_the_queue_is_bounded_in_tokens() -> None:
    async with Fleet(1, max_queued_tokens=10_000) as fleet:
        tasks = [asyncio.create_task(fleet.ask(ALICE, unique(2_048))) for _ in range(3)]
        await asyncio.sleep(1)
        await refused(fleet)
        one = asyncio.create_task(fleet.ask(BOB, unique(4_096)))
        await asyncio.sleep(0)
        await refused(fleet, BOB)
        await gone(*tasks, one)


async def test_O3_what_would_come_too_late_is_refused_early() -> None:
    hasty = tenant("hasty", ttft_deadline_ms=5_000.0)
    async with Fleet(1) as fleet:
        tasks = [asyncio.create_task(fleet.ask(ALICE, unique(1_024))) for _ in range(40)]
        await asyncio.sleep(5)
        own = [asyncio.create_task(fleet.ask(hasty, unique(1_024))) for _ in range(3)]
        await asyncio.sleep(0)
        error = await refused(fleet, hasty)
        assert fleet.queue.held.refused == {"deadline": 1}
        assert error.error.code == "overloaded"
        await gone(*tasks, *own)


async def test_O1_a_wait_has_its_deadline() -> None:
    patient = tenant("patient", ttft_deadline_ms=3_000.0)
    async with Fleet(1) as fleet:
        first = asyncio.create_task(fleet.ask(ALICE, unique(8_192)))
        await asyncio.sleep(0.1)
        began_s = asyncio.get_running_loop().time()
        await refused(fleet, patient, 8_192)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(3.0, abs=0.1)
        assert (fleet.queue.requests, fleet.queue.tokens) == (0, 0)
        await gone(first)


async def test_O4_after_a_burst_of_ten_times_the_capacity_all_is_well_in_seconds() -> None:
    """10 times the capacity for a minute: what is accepted keeps its deadline, the queue its bound,
    and five seconds after the burst whoever comes is served at once."""
    hasty = tenant("hasty", ttft_deadline_ms=4_000.0)
    served: list[float] = []
    statuses: list[int] = []
    most = 0

    async def one() -> None:
        try:
            served.append(await fleet.ask(hasty, unique(256), 10))
        except UserError as error:
            statuses.append(error.error.status)

    async with Fleet(2, max_queued_requests=64) as fleet:
        tasks = []
        for _ in range(60 * 80):
            tasks.append(asyncio.create_task(one()))
            await asyncio.sleep(1 / 80)
            most = max(most, fleet.queue.requests)
        await asyncio.sleep(5)
        assert most <= 64
        assert fleet.queue.requests == 0
        assert await fleet.ask(hasty, unique(256), 10) < 0.3
        await asyncio.gather(*tasks)
        assert set(statuses) == {429}
        assert len(served) > 0.95 * 60 * 2 * 1_000 / 257
        assert p95(served) < 5.0


async def test_without_anybody_to_route_to_nobody_waits() -> None:
    async with Fleet(1) as fleet:
        first = asyncio.create_task(fleet.ask(ALICE, unique(2_048)))
        await asyncio.sleep(0.1)
        waiting = asyncio.ensure_future(fleet.queue.wait(BOB, [job_of(BOB, unique(2_048), 8)], 72))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        fleet.world.fleet.link_state("r0", 1, False)
        assert await asyncio.wait_for(waiting, 1) > 0
        await gone(first)


async def test_a_pinned_request_waits_for_nobody() -> None:
    async with Fleet(1) as fleet:
        tasks = [asyncio.create_task(fleet.ask(ALICE, unique(2_048))) for _ in range(3)]
        await asyncio.sleep(1)
        assert await fleet.queue.wait(BOB, [job_of(BOB, unique(64), 8, pin="r0")], 72) == 0.0
        await gone(*tasks)
