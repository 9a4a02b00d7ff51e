"""All links of this router: one for each live replica that the fleet knows and the rules allow."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import aiohttp

from router.dispatch.address import AllowList
from router.dispatch.chutes import Chutes
from router.dispatch.introduction import LinkTarget, RouterIdentity
from router.dispatch.link import HANDSHAKE_S, LinkStateListener, ReplicaLink
from router.errors import LinkRefusedError

log = logging.getLogger(__name__)

RECONCILE_S = 0.1
MAX_LINKS = 1_024
OWN_PAUSE_S = 1.0
"""Between two looks at the links; more than that, and it was this router that stood still."""


async def _forbid_redirect(
    session: aiohttp.ClientSession, context: SimpleNamespace, params: object
) -> None:
    raise LinkRefusedError("redirect", "a replica's link answered with a redirect")


def _client_session(tls: ssl.SSLContext | None) -> aiohttp.ClientSession:
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_forbid_redirect)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True, ssl=tls or True),
        timeout=aiohttp.ClientTimeout(total=None, connect=HANDSHAKE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        trace_configs=[trace],
        trust_env=False,
    )


class Links:
    """Follows `targets()`. A replica that left keeps its link until its last stream has ended; a
    larger boot replaces the link at once."""

    def __init__(
        self,
        targets: Callable[[], Iterable[LinkTarget]],
        allow: AllowList,
        identity: RouterIdentity,
        on_state: LinkStateListener,
        tls: ssl.SSLContext | None = None,
        on_stall: LinkStateListener = lambda replica, boot, stalled: None,
        chutes: Callable[[], Chutes | None] = lambda: None,
    ) -> None:
        """`on_stall` is told when a replica falls silent, and when it is heard again. `tls`: what
        the router shows replicas, and what it asks of them. `chutes`: those of a new link."""
        self.refused: Counter[str] = Counter()
        self._targets = targets
        self._allow = allow
        self._identity = identity
        self._on_state = on_state
        self._tls = tls
        self._on_stall = on_stall
        self._chutes = chutes
        self._stalled: set[LinkTarget] = set()
        self._watched_s = 0.0
        self._changed = asyncio.Event()
        self._links: dict[str, ReplicaLink] = {}
        self._leaving: dict[LinkTarget, ReplicaLink] = {}
        self._rejected: set[LinkTarget] = set()
        self._session: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to follow."""
        self._session = _client_session(self._tls)
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Close every link."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        links = [*self._links.values(), *self._leaving.values()]
        self._links.clear()
        self._leaving.clear()
        await asyncio.gather(*(link.close() for link in links))
        if self._session is not None:
            await self._session.close()

    def get(self, replica: str) -> ReplicaLink | None:
        """The replica's current link, up or not."""
        return self._links.get(replica)

    def up(self) -> list[ReplicaLink]:
        """The links that requests can be sent on."""
        return [link for link in self._links.values() if link.up]

    async def wait_up(self, timeout_s: float) -> bool:
        """Until at least one link is up; False when that takes too long."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.up():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def all(self) -> list[ReplicaLink]:
        """Every current link."""
        return list(self._links.values())

    def unable_to_continue(self) -> frozenset[str]:
        """Replicas that can't go on where another one broke off."""
        return frozenset(name for name, link in self._links.items() if not link.continues)

    @property
    def in_flight(self) -> int:
        """Attempts in all tables."""
        return sum(link.in_flight for link in (*self._links.values(), *self._leaving.values()))

    @property
    def resumed(self) -> int:
        """Connections that went on where one before them broke, on the links of now."""
        return sum(link.counts["resumed"] for link in self.all())

    @property
    def late_deltas(self) -> int:
        """Deltas that came for nobody, on the links of now."""
        return sum(link.attempts.late_deltas for link in self.all())

    def _tell(self, replica: str, boot: int, up: bool) -> None:
        self._on_state(replica, boot, up)
        self._changed.set()

    async def _follow(self) -> None:
        while True:
            try:
                await self._reconcile()
                self._watch()
            except Exception:
                log.exception("following the fleet failed; trying again")
            await asyncio.sleep(RECONCILE_S)

    async def _reconcile(self) -> None:
        wanted = {target.replica: target for target in self._targets()}
        for replica, link in list(self._links.items()):
            if wanted.get(replica) != link.target:
                del self._links[replica]
                await self._retire(link, replaced=replica in wanted)
        for target in wanted.values():
            if target.replica not in self._links and self._admit(target):
                self._links[target.replica] = self._link_to(target)
        self._rejected &= set(wanted.values())
        self._stalled &= {*wanted.values(), *self._leaving}
        await self._close_idle()

    def _watch(self) -> None:
        """Who has fallen silent is given up, unless nobody else is there to serve. A router that
        was busy itself has nothing to say about others."""
        now_s = asyncio.get_running_loop().time()
        paused = now_s - self._watched_s > OWN_PAUSE_S
        self._watched_s = now_s
        for link in (*self._links.values(), *self._leaving.values()):
            if paused:
                link.excuse()
            link.beat()
            self._heed_silence(link)

    def _heed_silence(self, link: ReplicaLink) -> None:
        target = link.target
        if link.stalled:
            if target not in self._stalled:
                self._stalled.add(target)
                self._on_stall(target.replica, target.boot, True)
            if any(other.up and not other.stalled for other in self._links.values()):
                log.warning("replica %s is silent: what it serves moves", target.replica)
                link.abandon("stalled")
        elif link.up and target in self._stalled:
            self._stalled.discard(target)
            self._on_stall(target.replica, target.boot, False)

    def _link_to(self, target: LinkTarget) -> ReplicaLink:
        returning = self._leaving.pop(target, None)
        if returning is not None:
            returning.announce()
            return returning
        link = ReplicaLink(target, self._session, self._identity, self._tell, self._chutes())
        link.start()
        return link

    def _admit(self, target: LinkTarget) -> bool:
        if target in self._rejected or len(self._links) >= MAX_LINKS:
            return False
        try:
            self._allow.check(target.url)
        except LinkRefusedError as error:
            self._rejected.add(target)
            self.refused[error.reason] += 1
            log.warning("replica %s refused: %s", target.replica, error)
            return False
        return True

    async def _retire(self, link: ReplicaLink, replaced: bool) -> None:
        if replaced:
            await link.close()
        else:
            self._leaving[link.target] = link

    async def _close_idle(self) -> None:
        for target, link in list(self._leaving.items()):
            if not (link.up and link.in_flight):
                self._leaving.pop(target, None)
                await link.close()
