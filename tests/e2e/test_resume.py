"""Both ends of a link over connections that break: nothing lost, nothing doubled, never both."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from events.errors import UserError
from events.request import SamplingParams
from router.dispatch.address import AllowList
from router.dispatch.dispatch import Dispatcher
from router.dispatch.failover import RetryBudget, Run
from router.dispatch.introduction import LinkTarget, RouterIdentity
from router.dispatch.links import Links
from router.dispatch.sink import SinkLimits
from tests.e2e.proxy import LossyProxy
from tests.replica.front.rig import SECRET, Rig, rig
from tests.router.gateway.kit import Deaf, PlainChooser, job
from tests.waiting import PATIENCE_S, until

TOKENS = 60
LETTERS = bytes(itertools.islice(itertools.cycle(b"abcdefghijklmnopqrstuvwxyz"), TOKENS))


class Bed:
    """Fronts over scripted engines, a lossy proxy before each, and a router's links to them."""

    def __init__(self, fronts: list[Rig], proxies: list[LossyProxy]) -> None:
        self.fronts, self.proxies = fronts, proxies
        self.front, self.proxy = fronts[0], proxies[0]
        self.chooser = PlainChooser()
        self.listener = Deaf()
        self.stalls: list[tuple[str, bool]] = []
        targets = [
            LinkTarget(f"r{number}", 5, f"ws://127.0.0.1:{proxy.port}/link")
            for number, proxy in enumerate(proxies)
        ]
        identity = RouterIdentity("router-0", "boot-1", SECRET)
        self.links = Links(
            lambda: targets,
            AllowList(),
            identity,
            self.chooser.link_state,
            on_stall=lambda replica, boot, stalled: self.stalls.append((replica, stalled)),
        )
        self.dispatcher = Dispatcher(
            self.chooser, self.links, "boot-1", SinkLimits(1_000_000, 5.0), self.listener
        )

    @property
    def link(self):
        return self.links.get("r0")

    async def ask(self) -> str:
        """A whole answer's text."""
        sampling = SamplingParams(max_tokens=80, seed=1)
        text = ""
        with Run(job(model="m", sampling=sampling), self.dispatcher, RetryBudget(), 1) as run:
            while not run.done:
                text += "".join(delta.text for delta in await run.next(PATIENCE_S))
        return text


async def drive(front: Rig) -> None:
    """The engine: the next letter for every open child, every few ms."""
    said: dict[int, int] = {}
    engine = front.engine
    while True:
        await asyncio.sleep(0.002)
        for request in engine.requests:
            if request.child in engine.open:
                count = said.get(request.child, len(request.output)) + 1
                said[request.child] = count
                finish = "length" if count == TOKENS else None
                engine.step({request.child: LETTERS[count - 1 : count]}, finish=finish)


@asynccontextmanager
async def bed(
    cut_bytes: tuple[int, int] | None, seed: int = 0, replicas: int = 1
) -> AsyncIterator[Bed]:
    async with AsyncExitStack() as stack:
        fronts, proxies = [], []
        for number in range(replicas):
            front = await stack.enter_async_context(rig(name=f"r{number}"))
            port = int(front.url.rsplit(":", 1)[1])
            fronts.append(front)
            proxies.append(await stack.enter_async_context(LossyProxy(port, cut_bytes, seed)))
            stack.callback(asyncio.create_task(drive(front)).cancel)
        it = Bed(fronts, proxies)
        await it.links.start()
        stack.push_async_callback(it.links.close)
        await until(lambda: len(it.links.up()) == replicas)
        yield it


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))]
)
async def test_R17_connections_break_under_many_streams_and_nothing_is_lost_or_doubled(
    seed: int,
) -> None:
    async with bed((1_200, 8_000), seed) as it:
        asking = [asyncio.create_task(it.ask()) for _ in range(30)]
        await it.front.submitted(30)
        leaving, staying = asking[:6], asking[6:]
        await until(lambda: it.proxy.cuts > 2)
        for task in leaving:
            task.cancel()
        assert await asyncio.gather(*staying) == [LETTERS.decode()] * len(staying)
        await asyncio.wait(leaving)
        answered = [task for task in asking if not task.cancelled()]  # some before they could leave
        assert it.links.resumed >= 2
        assert len(it.front.engine.requests) == 30, "no attempt was sent twice"
        assert it.chooser.statuses.count("ok") == len(answered)
        await until(lambda: not it.front.engine.open and it.front.empty())
        assert it.links.in_flight == 0
    assert it.listener.continuations == 0


async def test_R17_who_comes_back_too_late_has_lost_the_session(monkeypatch) -> None:
    monkeypatch.setattr("router.dispatch.link.RESUME_S", 0.2)
    monkeypatch.setattr("replica.front.link.RESUME_S", 0.4)
    async with bed(None) as it:
        asking = asyncio.create_task(it.ask())
        await it.front.submitted(1)
        it.proxy.cut_bytes = (0, 0)
        it.proxy.cut()
        with pytest.raises(UserError) as caught:
            await asking
        assert caught.value.error.code == "replica_unreachable"
        await until(it.front.empty)
        it.proxy.cut_bytes = None
        assert await it.links.wait_up(5.0)
        assert await it.ask() == LETTERS.decode()


async def test_R17_what_the_router_gave_up_is_aborted_when_it_comes_back(monkeypatch) -> None:
    """Before the replica's own patience is over: a new session fences the old one."""
    monkeypatch.setattr("router.dispatch.link.RESUME_S", 0.1)
    monkeypatch.setattr("replica.front.link.RESUME_S", 60.0)
    async with bed(None) as it:
        asking = asyncio.create_task(it.ask())
        await it.front.submitted(1)
        it.proxy.cut_bytes = (0, 0)
        it.proxy.cut()
        with pytest.raises(UserError):
            await asking
        assert len(it.front.front.attempts) == 1
        it.proxy.cut_bytes = None
        await until(it.front.empty)
        assert await it.links.wait_up(5.0)
        assert await it.ask() == LETTERS.decode()


async def test_R17_a_replica_that_forgot_the_session_costs_its_streams_and_no_more() -> None:
    async with bed(None) as it:
        asking = asyncio.create_task(it.ask())
        await it.front.submitted(1)
        it.link._session_id = "nobody-knows"
        it.proxy.cut()
        with pytest.raises(UserError):
            await asking
        await until(it.front.empty)
        assert await it.links.wait_up(5.0)
        assert await it.ask() == LETTERS.decode()


async def test_idle_links_acknowledge_what_came() -> None:
    async with bed(None) as it:
        await it.ask()
        await until(lambda: not it.link._outgoing._sent)
        (guest,) = it.front.app._links._guests
        await until(lambda: not guest.session.outgoing._sent)


async def test_R13_silence_alone_is_an_alarm_and_costs_time_where_nobody_else_is(
    monkeypatch,
) -> None:
    monkeypatch.setattr("router.dispatch.link.STALLED_S", 0.7)
    async with bed(None) as it:
        asking = asyncio.create_task(it.ask())
        await it.front.submitted(1)
        it.proxy.flows.clear()
        await until(lambda: it.stalls == [("r0", True)])
        assert it.link.up
        it.proxy.flows.set()
        assert await asking == LETTERS.decode()
        await until(lambda: it.stalls == [("r0", True), ("r0", False)])
    assert it.chooser.statuses == ["ok"]


async def test_R13_a_silent_replica_loses_its_streams_to_another_one(monkeypatch) -> None:
    monkeypatch.setattr("router.dispatch.link.STALLED_S", 0.7)
    async with bed(None, replicas=2) as it:
        asking = [asyncio.create_task(it.ask()) for _ in range(6)]
        await asyncio.gather(*(front.submitted(3) for front in it.fronts))
        it.proxy.flows.clear()
        assert await asyncio.gather(*asking) == [LETTERS.decode()] * 6
        assert it.stalls == [("r0", True)]
        assert sorted(it.chooser.statuses) == ["ok"] * 6 + ["transport"] * 3
        it.proxy.flows.set()
        await until(lambda: it.front.empty() and len(it.links.up()) == 2)
        assert not it.front.engine.open, "what moved is aborted where it was"
