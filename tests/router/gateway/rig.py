"""Links over scripted replicas and a plain chooser: all of the data plane but the gateway."""

from __future__ import annotations

from router.dispatch.address import AllowList
from router.dispatch.dispatch import Dispatcher
from router.dispatch.failover import RetryBudget, Run
from router.dispatch.introduction import LinkTarget, RouterIdentity
from router.dispatch.links import Links
from router.dispatch.sink import SinkLimits
from tests.fakes.replica import FakeReplica
from tests.router.gateway.kit import Deaf, PlainChooser, job
from tests.waiting import until

IDENTITY = RouterIdentity("router-0", "boot-1", "link-secret")


class Rig:
    """Links over scripted replicas, a plain chooser, and a dispatcher."""

    def __init__(self, replicas: list[FakeReplica]) -> None:
        self.replicas = replicas
        self.targets = [LinkTarget(r.replica_id, r.boot, r.url) for r in replicas]
        self.chooser = PlainChooser()
        self.links = Links(lambda: self.targets, AllowList(), IDENTITY, self.chooser.link_state)
        self.listener = Deaf()
        self.limits = SinkLimits(buffer_bytes=4096, slow_reader_s=0.3)
        self.budget = RetryBudget()
        self.dispatcher = Dispatcher(
            self.chooser, self.links, IDENTITY.boot, self.limits, self.listener
        )

    def run(self, retries: int = 2, **changes: object) -> Run:
        return Run(job(**changes), self.dispatcher, self.budget, retries)

    async def up(self) -> None:
        await until(lambda: len(self.links.up()) == len(self.targets))

    def idle(self) -> bool:
        booked = sum(self.chooser.booked.values())
        calls = sum(replica.open_calls for replica in self.replicas)
        return booked == 0 and self.links.in_flight == 0 and calls == 0


async def collect(run: Run, texts: list[str] | None = None) -> str:
    texts = [] if texts is None else texts
    with run:
        while not run.done:
            texts.extend(delta.text for delta in await run.next(1.0))
    return "".join(texts)
