"""Hot heads through the whole gateway: replicas that cache, and count what they compute."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import pytest

from configs.model.card import ModelCard
from events.load import AdapterNote
from events.scale import ScaleSignal
from events.secrets import link_secret
from router.replication import replicate
from router.replication.compute import BACKGROUND_PRIORITY
from router.telemetry import beacon
from router.tenancy.tenants import TenantChange
from tests.fakes.caching import CachingReplica
from tests.fakes.scripts import Call
from tests.router.gateway.house import ADMIN_KEY, COMPLETION, KEYS, SECRET, House
from tests.waiting import until

HEAD = "You are the assistant of a library, and you know each of its books by heart. " * 8
CANARY = "canary-of-the-hot-head"
LIBRARIAN = AdapterNote("tiny/librarian", "content", True, 1.0)


class Library(House):
    """A house whose replicas cache."""

    replicas: list[CachingReplica]

    def new_replica(self, name: str, **changes: Any) -> CachingReplica:
        key = bytes.fromhex(SECRET)
        settings = {"secret": link_secret(key), "cluster_key": key, "model": self.card}
        return CachingReplica(name, **(settings | changes))

    async def join(self, name: str, **changes: Any) -> CachingReplica:
        replica = self.new_replica(name, **changes)
        self.replicas.append(replica)
        await replica.__aenter__()
        replica.announce(self.fleet)
        await until(lambda: name in {link.target.replica for link in self.services.links.up()})
        return replica

    async def ask(
        self,
        http: aiohttp.ClientSession,
        tail: object,
        key: str = "alice",
        head: str = HEAD,
        model: str = "tiny",
    ) -> str:
        """Who answered a prompt with the head."""
        body = {**COMPLETION, "model": model, "prompt": f"{head}{tail}"}
        async with self.post(http, "/v1/completions", body, key=KEYS[key]) as response:
            assert response.status == 200, await response.text()
            name = response.headers["x-warmroute-replica"]
        # What is still booked there would send the next one elsewhere.
        await until(lambda: len(self.services.brain.ledger) == 0)
        return name

    @property
    def background(self) -> list[Call]:
        """What was computed for nobody in particular."""
        return [call for call in self.calls if call.request.priority == BACKGROUND_PRIORITY]

    def ended(self, why: str, status: str = "done") -> Callable[[], bool]:
        totals = self.services.replicator.copies.totals
        return lambda: totals[why, status] > 0

    async def make_hot(self, http: aiohttp.ClientSession, model: str = "tiny") -> CachingReplica:
        """A head that one replica holds alone; the others are told apart from it by name."""
        names = set()
        for tail in range(7):
            names.add(await self.ask(http, tail, model=model))
        (name,) = names
        await until(lambda: bool(self.services.replicator.heat.heads))
        return next(replica for replica in self.replicas if replica.replica_id == name)


@pytest.fixture(autouse=True)
def quick_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicate, "ROUND_S", 0.05)


@pytest.fixture
async def library(tiny_card: ModelCard) -> AsyncIterator[Callable]:
    """`await library(replicas=3, **router settings)`."""
    async with AsyncExitStack() as stack:

        async def make(replicas: int = 3, **settings: Any) -> Library:
            house = Library(tiny_card, replicas, settings)
            house.adapters = {LIBRARIAN.name: LIBRARIAN.digest}
            await stack.enter_async_context(house)
            return house

        yield make


async def get(house: House, http: aiohttp.ClientSession, path: str) -> Any:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with http.get(house.url + path, headers=headers) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_R2_a_head_that_requests_are_forced_off_is_brought_elsewhere_and_told_of(
    library: Callable, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beacon, "PERIOD_S", 0.05)
    house: Library = await library(4)
    heard: list[ScaleSignal] = []
    await house.bus.subscribe(
        "wr.v1.local.router.router-0.scale",
        lambda _, data: heard.append(msgspec.msgpack.decode(data, type=ScaleSignal)),
    )
    for number in range(60):
        await house.ask(http, f"{number} something else", head="")
    first = await house.make_hot(http)
    assert house.background == []
    warm = [first]
    for number in range(2):
        warm[-1].queued_tokens = 20_000
        await until(lambda: house.fleet.member(warm[-1].replica_id).load.waiting)
        name = await house.ask(http, f"forced off {number}")
        warm.append(next(of for of in house.replicas if of.replica_id == name))
    assert len({of.replica_id for of in warm}) == 3
    await until(house.ended("forced_off"))
    (call,) = house.background
    assert call.request.tenant == "alice"
    assert call.request.sampling.max_tokens == 1
    assert call.replica not in warm
    assert call.replica.computed_tokens >= call.prompt_tokens
    assert house.services.replicator.budget.spent_ms_total < 2 * call.prompt_tokens
    seen = await get(house, http, "/router/hot")
    (head,) = seen["heads"]
    assert head["tokens"] == call.prompt_tokens
    assert call.replica.replica_id in head["holders"]
    assert any((of["why"], of["status"]) == ("forced_off", "done") for of in seen["copies"])
    scale = await get(house, http, "/router/scale")
    assert scale["forced_off_per_s"] > 0
    assert scale["forced_off_total"][first.replica_id] > 0
    assert scale["replicas"] == 4
    async with http.get(f"{house.url}/metrics") as response:
        text = await response.text()
    name = first.replica_id
    assert f'warmroute_forced_off_warm_total{{replica="{name}"}}' in text
    assert 'warmroute_head_copies_total{status="done",why="forced_off"}' in text
    assert "warmroute_hot_heads 1.0" in text
    house.gateway._beacon._round()
    await until(lambda: any(signal.forced_off_per_s > 0 for signal in heard))
    await house.settled()


async def test_E8_a_joining_replica_computes_the_hot_head_before_it_is_asked_for_it(
    library: Callable, http: aiohttp.ClientSession
) -> None:
    house: Library = await library(2)
    await house.make_hot(http)
    newcomer = await house.join("r9")
    await until(house.ended("joined"))
    (call,) = newcomer.calls
    assert newcomer.computed_tokens == call.prompt_tokens
    for replica in house.replicas[:2]:
        replica.queued_tokens = 10_000
    await until(lambda: all(m.load.waiting for m in map(house.fleet.member, ("r0", "r1"))))
    assert await house.ask(http, "after it joined") == "r9"
    assert newcomer.computed_tokens < 2 * call.prompt_tokens
    await house.settled()


async def test_E8_an_adapters_hot_head_is_computed_with_it_by_who_serves_it(
    library: Callable, http: aiohttp.ClientSession
) -> None:
    house: Library = await library(0)
    first = await house.join("r0", adapters=(LIBRARIAN,))
    assert await house.make_hot(http, LIBRARIAN.name) is first
    other = await house.join("r8")
    newcomer = await house.join("r9", adapters=(LIBRARIAN,))
    await until(house.ended("joined"))
    (call,) = newcomer.calls
    assert call.request.adapter == (LIBRARIAN.name, LIBRARIAN.digest)
    assert newcomer.held <= first.held
    assert not other.calls
    await house.settled()


async def test_R20_the_hot_head_of_a_draining_replica_lives_elsewhere_before_its_end(
    library: Callable, http: aiohttp.ClientSession
) -> None:
    house: Library = await library(3)
    first = await house.make_hot(http)
    await until(lambda: bool(house.services.replicator._held))
    first.draining = True
    await until(house.ended("left"))
    assert first.open_calls == 0
    await first.die()
    (call,) = house.background
    assert call.replica is not first
    assert await house.ask(http, "after the drain") == call.replica.replica_id
    assert call.replica.computed_tokens < call.prompt_tokens + 100
    await house.settled()


async def test_S2_a_head_is_warmed_for_its_owner_and_for_nobody_else(
    library: Callable, http: aiohttp.ClientSession
) -> None:
    house: Library = await library(1)
    await house.make_hot(http)
    newcomer = await house.join("r9")
    await until(house.ended("joined"))
    alice, bob = (house.services.tenants.named(name) for name in ("alice", "bob"))
    assert {call.request.salt for call in newcomer.calls} == {alice.salt}
    house.replicas[0].queued_tokens = 100_000
    await until(lambda: house.fleet.member("r0").load.waiting)
    before = newcomer.computed_tokens
    assert await house.ask(http, "the same text", key="bob") == "r9"
    assert newcomer.computed_tokens - before == newcomer.calls[-1].prompt_tokens
    assert newcomer.calls[-1].request.salt == bob.salt
    # In its new scope the owner would not find it: nothing is warmed any more.
    house.services.tenants.put("alice", TenantChange(scope="group:others"))
    last = await house.join("r8")
    await until(house.ended("joined", "failed"))
    assert last.calls == []


async def test_O8_S2_what_is_shown_and_logged_of_a_hot_head_tells_no_text(
    library: Callable,
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("tests.router.gateway.test_hot.HEAD", CANARY * 20)
    caplog.set_level("DEBUG")
    house: Library = await library(1)
    await house.make_hot(http)
    await house.join("r9")
    await until(house.ended("joined"))
    head = house.services.replicator.heat.heads[0]
    ids = ", ".join(map(str, memoryview(head.prompt).cast("I")[:8]))
    seen = str(await get(house, http, "/router/hot"))
    for secret in (CANARY, ids, head.chain.data.hex(), head.key.hex(), repr(head.prompt[:8])):
        assert secret not in seen
        assert secret not in caplog.text
    async with http.get(f"{house.url}/router/hot") as response:
        assert response.status == 200, "whoever may ask without a key may look"


async def test_switched_off_nothing_is_kept_or_copied(
    library: Callable, http: aiohttp.ClientSession
) -> None:
    house: Library = await library(2, replicate=False)
    for tail in range(8):
        await house.ask(http, tail)
    house.services.replicator.round()
    assert house.services.replicator.heat.heads == []
    assert (await get(house, http, "/router/hot"))["replicate"] is False
    assert (await get(house, http, "/router/scale"))["decisions_per_s"] > 0


async def test_R20_a_router_that_drains_stops_its_copies_at_once(
    library: Callable, http: aiohttp.ClientSession
) -> None:
    house: Library = await library(1)
    await house.make_hot(http)
    newcomer = house.new_replica("r9")
    newcomer.gate.clear()
    house.replicas.append(newcomer)
    await newcomer.__aenter__()
    newcomer.announce(house.fleet)
    await newcomer.wait_calls(1)
    async with asyncio.timeout(house.config.router.drain_s / 2):
        await house.gateway.drain()
    await newcomer.calls[0].aborted.wait()
    await house.settled()
    assert house.services.replicator.copies.running == []
    assert len(house.services.brain.ledger) == 0
