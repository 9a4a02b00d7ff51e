"""A whole cluster as children of this process: bus, replicas, router; started, watched, stopped."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp

from configs.schema import (
    BusConfig,
)
from events.errors import WarmrouteError
from events.server import EmbeddedNats
from tools.admin import AdminClient
from tools.errors import CommandError
from tools.up.child import STOP_S, Child, RestartBudget, SlowStartError
from tools.up.options import (
    UpOptions,
    backend_names,
    check_port_free,
    cluster_config,
    kv_config,
    replica_names,
    router_names,
    router_ports,
)
from tools.up.remote import RemoteStore, named_store
from tools.up.state import ClusterState, lock, open_state, write_cluster
from tools.up.together import together

READY_S = 120.0
PATIENT_S = 600.0
"""The most that a child is given that was too slow to start again; each time it gets twice as long
as the time before."""
START_TRIES = 6
"""That many failed starts in a row are given up."""
LINK_S = 30.0
LINK_POLL_S = 0.05
SAY_S = 1.0
"""Beyond it whoever waits is told what for."""
RESTART_PAUSE_S = 1.0
"""Behind a failed start, and twice as long behind each further one."""
_PORT = "WARMROUTE_ROUTER__PORT"
Say = Callable[[str], None]
T = TypeVar("T")


class LocalCluster:
    """`async with LocalCluster(options, say) as cluster`: everything is up inside the block.

    Every child has ended when the block is left, however it is left.
    """

    def __init__(self, options: UpOptions, say: Say) -> None:
        self._options = options
        self._say = say
        self._state: ClusterState | None = None
        self._lock = -1
        self._nats: EmbeddedNats | None = None
        self._kvd: Child | None = None
        self._remote: RemoteStore | None = None
        self._replicas: list[Child] = []
        self._bridges: list[Child] = []
        self._routers: list[Child] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[str] | None = None
        self.urls: tuple[str, ...] = ()

    @property
    def state(self) -> ClusterState:
        """The state folder; only inside the block."""
        assert self._state is not None
        return self._state

    async def __aenter__(self) -> LocalCluster:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def wait_failed(self) -> str:
        """Ends only when a child can't be kept alive: the reason."""
        assert self._failed is not None
        return await self._failed

    async def _start(self) -> None:
        options = self._options
        store = named_store(options.kv.remote) if options.kv.remote else None
        # Before the ports: who starts this cluster twice needs more than another one of those.
        self._state = open_state(options.state)
        self._lock = lock(self._state)
        for port in router_ports(options):
            check_port_free(options.host, port)
        self._failed = asyncio.get_running_loop().create_future()
        await self._start_bus()
        await self._start_kvd()
        self._start_remote()
        if store is not None:
            self._say(f"remote   {await asyncio.to_thread(store.look)}")
        await self._start_replicas()
        await self._start_bridges()
        await self._start_routers()

    async def _start_bus(self) -> None:
        names = (*replica_names(self._options), *backend_names(self._options))
        self._nats = EmbeddedNats(
            self.state.folder / "nats",
            self._options.cluster,
            names,
            router_names(self._options),
            port=self._options.bus_port,
        )
        try:
            await self._nats.start()
        except WarmrouteError as error:
            raise CommandError(str(error)) from error
        write_cluster(self.state, cluster_config(self._options, self.state, self._nats.url))
        self._say(f"bus      nats-server on {self._nats.url}")
        self._watchers.append(asyncio.create_task(self._keep_bus(self._nats)))

    async def _started(self, starting: Mapping[str, Coroutine[None, None, T]]) -> list[T]:
        logs = self.state.log("").parent
        return await together(starting, self._say, f"up to {READY_S:.0f} s; logs: {logs}")

    def _child(self, name: str, module: str, bus: BusConfig, extra: tuple[str, ...] = ()) -> Child:
        environ = {
            "WARMROUTE_BUS__USER": bus.user,
            "WARMROUTE_BUS__PASSWORD": bus.password,
            "OMP_NUM_THREADS": str(self._options.replica_settings.get("threads", 1)),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        args = ("--config", str(self.state.cluster_file), *extra)
        log = self.state.log(name)
        log.write_bytes(b"")
        return Child(name, module, args, environ, log)

    async def _start_kvd(self) -> None:
        if self._options.kv.host != "auto" or not replica_names(self._options):
            return
        kv = kv_config(self._options, self.state)
        self._kvd = self._child("kvd", "kvstore.kvd", BusConfig())
        await self._started({"kvd": self._kvd.start(READY_S)})
        self._say(f"kvd      {kv.host_bytes >> 20} MiB of KV memory for all replicas")
        self._watch(self._kvd)

    async def _start_replicas(self) -> None:
        assert self._nats is not None
        names = replica_names(self._options)
        if not names:
            return
        self._say(f"replicas {len(names)} starting (loading the model)")
        self._replicas = [
            self._child(name, "replica.server", self._nats.replica(name), ("--replica", name))
            for name in names
        ]
        if self._remote is not None:
            for child in self._replicas:
                child.environ |= self._remote.environ
        await self._started({child.name: self._start_replica(child) for child in self._replicas})

    async def _start_replica(self, child: Child) -> None:
        began = time.monotonic()
        url = await child.start(READY_S)
        self._say(f"replica  {child.name} ready after {time.monotonic() - began:.1f} s ({url})")
        self._watch(child)

    async def _start_bridges(self) -> None:
        assert self._nats is not None
        if not self._options.bridge:
            return
        self._bridges = [
            self._child(f"bridge-{name}", "tools.bridge", self._nats.replica(name), ("--id", name))
            for name in backend_names(self._options)
        ]
        for child in self._bridges:
            (url,) = await self._started({child.name: child.start(READY_S)})
            self._say(f"bridge   {child.name} beside {url}")
            self._watch(child)

    async def _start_routers(self) -> None:
        assert self._nats is not None
        for name, port in zip(
            router_names(self._options), router_ports(self._options), strict=True
        ):
            child = self._child(name, "router.app", self._nats.router(name))
            child.environ |= {"WARMROUTE_ROUTER__ID": name, _PORT: str(port)}
            self._routers.append(child)
        starting = {child.name: self._start_router(child) for child in self._routers}
        self.urls = tuple(await self._started(starting))
        self._keep_port()
        for url in self.urls:
            await self._wait_linked(url)

    def _start_remote(self) -> None:
        if not self._options.remote:
            return
        self._remote = RemoteStore(self.state.folder / "valkey")
        self._remote.start()
        mib = self._remote.max_bytes >> 20
        self._say(f"remote   Valkey with {mib} MiB for KV on 127.0.0.1:{self._remote.port}")
        self._watchers.append(asyncio.create_task(self._remote.keep(self._say, self._fail)))

    async def _start_router(self, child: Child) -> str:
        url = await child.start(READY_S)
        # One that has to be started again listens where clients know it.
        child.environ[_PORT] = str(urlsplit(url).port)
        self._say(f"router   {child.name} {url}")
        self._watch(child)
        return url

    def _keep_port(self) -> None:
        """Other commands find the first router in the cluster file."""
        assert self._nats is not None
        self._options = replace(self._options, port=urlsplit(self.urls[0]).port)
        write_cluster(self.state, cluster_config(self._options, self.state, self._nats.url))

    async def _wait_linked(self, url: str) -> None:
        """Until the gateway can send to every replica: no first request comes too early."""
        missing = {*replica_names(self._options), *backend_names(self._options)}
        now_s = time.monotonic()
        say_s, deadline_s = now_s + SAY_S, now_s + LINK_S
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LINK_S)) as session:
            gateway = AdminClient(session, url, self.state.keys.admin_key)
            while missing:
                if time.monotonic() > deadline_s:
                    raise CommandError(self._unreached(missing))
                await asyncio.sleep(LINK_POLL_S)
                views = await gateway.replicas()
                missing -= {view["replica"] for view in views if view["linked"]}
                if missing and time.monotonic() > say_s:
                    say_s = math.inf
                    self._say(f"waiting  {self._unreached(missing)} (up to {LINK_S:.0f} s)")

    def _unreached(self, missing: set[str]) -> str:
        """What a router can't send to; a server that we did not start may just not run."""
        urls = dict(zip(backend_names(self._options), self._options.backends, strict=True))
        named = [f"{name} at {urls[name]}" if name in urls else name for name in sorted(missing)]
        hint = ": does that server run?" if missing & urls.keys() else ""
        return f"no answer yet from {', '.join(named)}{hint}"

    def _watch(self, child: Child) -> None:
        self._watchers.append(asyncio.create_task(self._keep_alive(child)))

    async def _keep_alive(self, child: Child) -> None:
        """Start it again whenever it ends."""
        budget = RestartBudget()
        while True:
            status = await child.wait()
            if not budget.take():
                self._fail(f"{child.name} ended again and again: {_reason(child, status)}")
                return
            self._say(f"{child.name} ended ({_reason(child, status)}): starting it again")
            try:
                await start_patiently(child, self._say)
            except CommandError as error:
                self._fail(str(error))
                return
            self._say(f"{child.name} is back")

    async def _keep_bus(self, nats: EmbeddedNats) -> None:
        budget = RestartBudget()
        while True:
            await nats.wait_ended()
            if not budget.take():
                self._fail("nats-server ended again and again")
                return
            self._say("nats-server ended: starting it again")
            try:
                await nats.start()
            except WarmrouteError as error:
                self._say(str(error))
                await asyncio.sleep(RESTART_PAUSE_S)

    def hurry(self) -> None:
        """Stop waiting for children that drain: kill them."""
        kvd = () if self._kvd is None else (self._kvd,)
        for child in (*self._routers, *self._bridges, *self._replicas, *kvd):
            child.kill()

    async def _ended(self, children: Sequence[Child]) -> None:
        hint = f"up to {STOP_S:.0f} s for open streams; again: stop at once"
        await together({child.name: child.stop() for child in children}, self._say, hint, SAY_S)

    def _fail(self, reason: str) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(reason)

    async def _stop(self) -> None:
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        # Whoever waits for open streams is told so: routers first, then what they send to.
        await self._ended(self._routers)
        await self._ended([*self._bridges, *self._replicas])
        await self._ended([] if self._kvd is None else [self._kvd])
        if self._remote is not None:
            self._remote.stop()
        if self._nats is not None:
            await self._nats.stop()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


async def start_patiently(
    child: Child, say: Say, ready_s: float = READY_S, pause_s: float = RESTART_PAUSE_S
) -> None:
    """Try until it is ready: one that was too slow gets more time, one that ends by itself is left
    alone for longer and longer. Raises CommandError after START_TRIES."""
    most_s = ready_s * PATIENT_S / READY_S
    for tries in range(1, START_TRIES + 1):
        try:
            await child.start(ready_s)
        except SlowStartError as error:
            failure, ready_s = error, min(most_s, 2 * ready_s)
            again = f"trying again, with up to {ready_s:.0f} s"
        except CommandError as error:
            failure, again = error, f"trying again in {pause_s:.0f} s"
        else:
            return
        if tries < START_TRIES:
            say(f"{failure}: {again}")
            await asyncio.sleep(pause_s)
            pause_s *= 2
    raise CommandError(f"given up after {START_TRIES} tries: {failure}")


def _reason(child: Child, status: int) -> str:
    """Why it ended: whoever gives up by itself has said so last."""
    return f"signal {-status}" if status < 0 else f"status {status}: {child.last_words()}"
