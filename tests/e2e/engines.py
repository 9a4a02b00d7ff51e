"""A gateway over replicas with real engines, all in one process, any of which can be killed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from functools import partial

import msgspec
import numpy as np
from aiohttp import web

from configs.model.card import ModelCard
from configs.schema import ReplicaConfig
from events.secrets import link_secret, parse_secret
from kvstore.identity import Namespace
from replica.engine.loop import EngineThread
from replica.engine.messages import StepOutput
from replica.front.build import FrontApp, Patience, build_front
from replica.front.check import Limits
from replica.front.intake import Served
from replica.front.link import LinkSettings
from replica.front.output import StepQueue
from replica.grammar.compiler import GrammarCompiler
from replica.runner.build import build_runner
from replica.server import bind
from router.fleet.fleet import Fleet
from tests.fakes.replica import DIGEST, FakeReplica
from tests.router.gateway.house import SECRET, House
from tests.waiting import until

KEY = parse_secret(SECRET)


class Tap:
    """Lets the outputs of some steps through, and tells when it has shut."""

    def __init__(self, queue: StepQueue, loop: asyncio.AbstractEventLoop) -> None:
        self.shut = asyncio.Event()
        self._queue = queue
        self._loop = loop
        self._steps: int | None = None
        self._lock = threading.Lock()

    def let_through(self, steps: int | None) -> None:
        """So many steps from now on; None for all."""
        with self._lock:
            self._steps = steps
            self.shut.clear()

    def __call__(self, output: StepOutput) -> None:
        with self._lock:
            if self._steps is not None:
                if self._steps == 0:
                    self._loop.call_soon_threadsafe(self.shut.set)
                    return
                self._steps -= 1
            self._queue(output)


class RealReplica:
    """Engine, front and door of one replica; `kill` and `revive` do what kill -9 and a start do to
    those who look from outside."""

    def __init__(self, name: str, card: ModelCard) -> None:
        self.name = name
        loop = asyncio.get_running_loop()
        queue = StepQueue(loop)
        self.tap = Tap(queue, loop)
        config = ReplicaConfig(
            id=name, dtype="float32", kernel="torch", threads=1, kv_blocks=128, block_tokens=16
        )
        self._engine = EngineThread(build_runner(card, config), self.tap, config, KEY, check=True)
        self._engine.start()
        self._scripted = FakeReplica(name, cluster_key=KEY, model=card)
        self._served = partial(
            Served,
            limits=Limits("tiny", card.shape.vocab, card.shape.context_tokens),
            vocabulary=card.tokenizer,
            eos_ids=card.eos_ids,
            cluster_key=KEY,
            namespace=Namespace.of_hello(self._scripted.hello()),
            mailbox_bytes=1_000_000,
        )
        self._queue, self._card = queue, card
        self.app = self._front()
        self._runner: web.AppRunner | None = None
        self._port = 0

    def _front(self) -> FrontApp:
        """As a process that starts has it: nothing is left of the one before but the engine."""
        compiler = GrammarCompiler(self._card.tokenizer, self._card.eos_ids)
        link = LinkSettings(replica=self.name, boot=1, secret=link_secret(KEY))
        served = self._served(compiler=compiler)
        return build_front(self._engine, self._queue, served, link, Patience())

    async def revive(self) -> None:
        """Listen, on the same port each time."""
        if self._runner is not None:
            self.app = self._front()
        self._runner = self.app.runner()
        await self._runner.setup()
        await web.SockSite(self._runner, bind("127.0.0.1", self._port)).start()
        self._port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """Cut every connection and close the door; the engine forgets what it did."""
        assert self._runner is not None
        for site in list(self._runner.sites):
            await site.stop()
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()
        await until(lambda: not self.attempts and not self._engine.open_children())

    @property
    def attempts(self) -> int:
        """Attempts that it serves."""
        return len(self.app.front.attempts)

    async def said_all(self) -> None:
        """Until nothing waits to be sent."""
        await until(lambda: all(not len(a.mailbox) for a in self.app.front.attempts))

    def announce(self, fleet: Fleet) -> None:
        """Hello and one heartbeat."""
        url = f"ws://127.0.0.1:{self._port}/link"
        hello = msgspec.structs.replace(self._scripted.hello(), link_url=url)
        fleet.on_hello(self.name, 1, hello)
        bits = np.zeros(DIGEST.bits // 8, dtype=np.uint8)
        fleet.on_digest_reset(self.name, 1, 1, 0, DIGEST, bits)
        fleet.on_load(self.name, 1, self._scripted.load())

    async def close(self) -> None:
        """End everything."""
        if self._runner is not None:
            await self._runner.cleanup()
        await asyncio.to_thread(self._engine.close)


class Pair:
    """A House with two real replicas. Use as an async context manager."""

    def __init__(self, card: ModelCard) -> None:
        self.house = House(card, 0, {})
        self.replicas: list[RealReplica] = []

    async def __aenter__(self) -> Pair:
        await self.house.__aenter__()
        self.replicas = [RealReplica(name, self.house.card) for name in ("r0", "r1")]
        for replica in self.replicas:
            await replica.revive()
            replica.announce(self.house.fleet)
        await self.house.up(2)
        return self

    async def __aexit__(self, *_: object) -> None:
        for replica in self.replicas:
            await replica.close()
        await self.house.__aexit__()

    def let_through(self, steps: int | None) -> None:
        """Both taps."""
        for replica in self.replicas:
            replica.tap.let_through(steps)

    async def kill_who_shuts(self) -> None:
        """Kill the replica whose tap shuts first, once all before it was sent."""
        waits = {asyncio.create_task(r.tap.shut.wait()): r for r in self.replicas}
        done, rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        victim = waits[done.pop()]
        self.let_through(None)
        victim.tap.let_through(0)
        await victim.said_all()
        await victim.kill()
        victim.tap.let_through(None)
        await victim.revive()
        await self.house.up(2)


def texts(documents: Iterable[dict]) -> dict[int, str]:
    """The joined text of each choice."""
    joined: dict[int, str] = {}
    for choice in (c for document in documents for c in document["choices"]):
        part = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        joined[choice["index"]] = joined.get(choice["index"], "") + part
    return joined
