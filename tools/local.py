"""The gateway that `warmroute up` started on this machine, as the other commands reach it."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from tools.admin import AdminClient
from tools.up.state import cluster_of, default_folder, read_keys


def admin_of(session: aiohttp.ClientSession, state: Path | None, url: str | None) -> AdminClient:
    """A client of the gateway that `warmroute up` started: the one with that state folder, else the
    default one; at `url`, where that is given. Raises CommandError and ConfigError."""
    folder = state or default_folder("local")
    keys = read_keys(folder)
    router = cluster_of(folder).router
    return AdminClient(session, url or f"http://{router.host}:{router.port}", keys.admin_key)
