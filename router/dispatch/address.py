"""Which replica addresses the router may dial: checked before any connection is opened."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from configs.schema import ClusterConfig
from router.errors import LinkRefusedError


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AllowList:
    """Loopback addresses, and the hosts that the cluster file names. Nothing else is dialled, and
    with `tls` nothing without it."""

    def __init__(self, hosts: Iterable[str] = (), tls: bool = False) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._scheme = "wss" if tls else "ws"

    @classmethod
    def of(cls, config: ClusterConfig) -> AllowList:
        """`router.link_hosts`, and the hosts of the replicas in the file."""
        named = {replica.host for replica in config.replicas} - {"0.0.0.0", "::"}
        return cls(named | set(config.router.link_hosts), config.link_tls is not None)

    def check(self, url: str) -> str:
        """The url itself. Raises LinkRefusedError."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise LinkRefusedError("bad_url", "a replica announced a link that is no URL") from None
        if parts.scheme != self._scheme:
            raise LinkRefusedError("scheme", f"a replica's link must be a {self._scheme}:// URL")
        if parts.username is not None or parts.query or parts.fragment or not port:
            raise LinkRefusedError(
                "bad_url", f"a replica's link must be {self._scheme}://host:port/path"
            )
        if not _is_loopback(host) and host not in self._hosts:
            raise LinkRefusedError("host", "a replica's link points to a host that is not allowed")
        return url
