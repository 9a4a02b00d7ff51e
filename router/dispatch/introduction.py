"""Who dials whom over a link, the first words of both, and whether they are acceptable."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp

from events.output import LinkWelcome
from events.request import LINK_VERSION, LinkHello
from events.wire import decode_replica_frame
from router.errors import LinkRefusedError


@dataclass(frozen=True, slots=True)
class LinkTarget:
    """Whom to dial: a replica's id, the boot that the feed knows, and its link's URL."""

    replica: str
    boot: int
    url: str


@dataclass(frozen=True, slots=True)
class RouterIdentity:
    """Who dials. `secret` authenticates the link and is never logged."""

    router_id: str
    boot: str
    secret: str

    def hello(self, session: str, received: int | None) -> LinkHello:
        """The first frame: of a new session, or of one of which `received` frames are here."""
        return LinkHello(
            version=LINK_VERSION,
            router_id=self.router_id,
            router_boot=self.boot,
            secret=self.secret,
            session=session,
            received=received,
        )


def check_welcome(message: aiohttp.WSMessage, target: LinkTarget) -> LinkWelcome:
    """The answer to a hello. Raises LinkRefusedError when it isn't that of `target`."""
    if message.type is not aiohttp.WSMsgType.BINARY:
        raise LinkRefusedError("refused", "the replica refused the link")
    welcome = decode_replica_frame(message.data)
    if not isinstance(welcome, LinkWelcome):
        raise LinkRefusedError("malformed", "the replica's first frame is no welcome")
    if welcome.version != LINK_VERSION:
        raise LinkRefusedError("version", "the replica speaks another version of the link")
    if welcome.replica != target.replica:
        raise LinkRefusedError("identity", "another replica answers at this address")
    if welcome.boot != target.boot:
        raise LinkRefusedError("fenced", "the replica is of another boot than the bus says")
    return welcome
