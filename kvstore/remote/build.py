"""The tier that a URL names. A connector's packages are imported only where it is asked for."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from kvstore.errors import StoreError
from kvstore.peer.client import PeerAddress, peer_tier
from kvstore.tier import Tier

FILE_SHARE = 4
"""Without `?max_bytes=` a folder takes one FILE_SHARE-th of what its disk has free."""


def build_tier(
    url: str,
    *,
    secret: bytes,
    ttl_s: float | None = None,
    peer_tls: ssl.SSLContext | None = None,
) -> Tier:
    """The store behind `url`; blocks live for `ttl_s` after their last use, where it can do that.

    valkey://, redis:// (plain), valkeys://, rediss:// (TLS): [user:password@]host[:port][/db];
    file:///folder[?max_bytes=N]; s3://bucket[/prefix][?endpoint=URL&region=NAME]; peer://host:port,
    which needs the cluster's `secret`, and `peer_tls` where that host wants TLS;
    lmcache://127.0.0.1[:port]?python=PATH, a server of this host. Raises ValueError
    on a URL that names none, with no secret in its text, and StoreError when the store can't be
    used here.
    """
    scheme = urlsplit(url).scheme
    if scheme == "peer":
        return peer_tier(PeerAddress.from_url(url), secret, tls=peer_tls)
    build = _BUILDERS.get(scheme)
    if build is None:
        known = "".join(f" {name}://" for name in sorted({*_BUILDERS, "peer"}))
        raise ValueError(f"a KV store is named by a URL that begins with one of{known}")
    return build(url, ttl_s)


def _valkey(url: str, ttl_s: float | None) -> Tier:
    try:
        from kvstore.remote.endpoint import Endpoint
        from kvstore.remote.valkey import valkey_tier
    except ModuleNotFoundError as error:
        raise _missing(error, "valkey") from None
    return valkey_tier(Endpoint.from_url(url), ttl_s)


def _s3(url: str, ttl_s: float | None) -> Tier:
    try:
        from kvstore.remote.s3 import Bucket, s3_tier
    except ModuleNotFoundError as error:
        raise _missing(error, "s3") from None
    return s3_tier(Bucket.from_url(url))


def _file(url: str, ttl_s: float | None) -> Tier:
    from kvstore.remote.file import DEFAULT_TTL_S, file_tier

    parts = urlsplit(url)
    if parts.netloc or not parts.path.strip("/"):
        raise ValueError("a folder's URL is file:///folder[?max_bytes=N]")
    folder = Path(unquote(parts.path))
    said = dict(parse_qsl(parts.query)).get("max_bytes", "")
    if said and not said.isdecimal():
        raise ValueError("max_bytes is a number of bytes")
    max_bytes = int(said) if said else _share_of_disk(folder)
    return file_tier(folder, max_bytes, DEFAULT_TTL_S if ttl_s is None else ttl_s)


def _lmcache(url: str, ttl_s: float | None) -> Tier:
    from kvstore.remote.lmcache.tier import LMCacheAddress, lmcache_tier

    return lmcache_tier(LMCacheAddress.from_url(url))


def _share_of_disk(folder: Path) -> int:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free // FILE_SHARE


def _missing(error: ModuleNotFoundError, extra: str) -> StoreError:
    return StoreError(f"{error.name} is missing: pip install -e '.[{extra}]'")


_BUILDERS: dict[str, Callable[[str, float | None], Tier]] = {
    "file": _file,
    "lmcache": _lmcache,
    "redis": _valkey,
    "rediss": _valkey,
    "s3": _s3,
    "valkey": _valkey,
    "valkeys": _valkey,
}
