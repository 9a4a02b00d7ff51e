"""Where an engine publishes its events: vLLM says it at /kv_event_sources."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import aiohttp
import msgspec

from router.backends.roster import Backend
from tools.bridge.source import Endpoints
from tools.errors import CommandError

PATH = "/kv_event_sources"
TIMEOUT_S = 5.0
MAX_BYTES = 64 * 1024
ANYWHERE = ("*", "0.0.0.0", "::")


class _Source(msgspec.Struct):
    endpoint: str
    replay_endpoint: str | None = None


_decoder = msgspec.json.Decoder(dict[str, _Source])


class UnreachableError(Exception):
    """The engine does not answer now; it may later."""


async def discover(backend: Backend) -> Endpoints:
    """Of its only rank. Raises UnreachableError, or CommandError where it can't be found so."""
    headers = {"Authorization": f"Bearer {backend.key}"} if backend.key else {}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
            session.get(backend.url + PATH, headers=headers, allow_redirects=False) as answer,
        ):
            status, body = answer.status, await answer.content.read(MAX_BYTES)
    except (TimeoutError, aiohttp.ClientError, OSError):
        raise UnreachableError from None
    if status >= 500:
        raise UnreachableError
    if status != 200:
        raise CommandError(f"the server has no {PATH} (status {status}): give --events")
    return endpoints_of(body, urlsplit(backend.url).hostname or "")


def endpoints_of(body: bytes, host: str) -> Endpoints:
    """From the answer's body; `host` is the backend's own. Raises CommandError."""
    try:
        sources = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        raise CommandError(f"{PATH} can't be read: give --events") from None
    if len(sources) != 1:
        raise CommandError(
            f"the server has {len(sources)} event sources; a bridge follows one: give --events"
        )
    (source,) = sources.values()
    replay = source.replay_endpoint
    return Endpoints(
        _address(source.endpoint, host),
        _address(replay, host) if replay else "",
        _awaited(source.endpoint),
    )


def _awaited(endpoint: str) -> bool:
    """vLLM listens at any address and at ipc://, and connects to everything else: to this machine
    only we can be meant."""
    name = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return endpoint.startswith("tcp://") and name not in ANYWHERE and _is_loopback(name)


def _address(endpoint: str, host: str) -> str:
    """An address to connect to. A server may name itself or this machine, nobody else."""
    if endpoint.startswith("ipc://"):
        return endpoint
    scheme, _, rest = endpoint.partition("://")
    name, _, port = rest.rpartition(":")
    name = name.strip("[]")
    if scheme != "tcp" or not port.isdigit():
        raise CommandError(f"the server names an event source that is no address: {endpoint[:80]}")
    if name in ANYWHERE:
        name = host
    elif name != host and not _is_loopback(name):
        raise CommandError(f"the server's event source is on another host ({name[:80]})")
    return f"tcp://[{name}]:{port}" if ":" in name else f"tcp://{name}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
