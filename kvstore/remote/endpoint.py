"""Where a RESP server is and how to get in, from its URL. Knows no commands."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qsl, unquote, urlsplit

PLAIN_SCHEMES = ("valkey", "redis")
TLS_SCHEMES = ("valkeys", "rediss")
DEFAULT_PORT = 6379


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server. The password shows in no repr."""

    host: str
    port: int = DEFAULT_PORT
    username: str = ""
    password: str = field(default="", repr=False)
    database: int = 0
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    @classmethod
    def from_url(cls, url: str) -> Endpoint:
        """`valkey[s]://[user:password@]host[:port][/database][?ca=FILE]`; `redis[s]` is the same.

        Raises ValueError with a text that repeats no secret.
        """
        parts = urlsplit(url)
        if parts.scheme not in PLAIN_SCHEMES + TLS_SCHEMES or not parts.hostname:
            raise ValueError(
                "a RESP store's URL is valkey://[user:password@]host[:port][/database]"
            )
        path = parts.path.strip("/")
        if path and not path.isdecimal():
            raise ValueError(f"the database of a RESP store is a number, not {path!r}")
        options = dict(parse_qsl(parts.query))
        tls = None
        if parts.scheme in TLS_SCHEMES:
            tls = ssl.create_default_context(cafile=options.get("ca"))
        return cls(
            host=parts.hostname,
            port=parts.port or DEFAULT_PORT,
            username=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            database=int(path or 0),
            tls=tls,
        )

    def at(self, host: str, port: int) -> Endpoint:
        """The same way in, at another node of the cluster (which has database 0 only)."""
        return replace(self, host=host or self.host, port=port, database=0)
