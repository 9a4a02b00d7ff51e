"""What `warmroute kv flush` does in the store for all hosts."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from configs.schema import KvConfig
from events.secrets import block_mac_key
from kvstore.block import Signed
from kvstore.errors import StoreError
from kvstore.identity import KEY_BYTES
from kvstore.remote.build import build_tier
from kvstore.tier import Read, Status
from tools.errors import CommandError

LOOK_S = 2.0


def url_of(kv: KvConfig, state: Path) -> str:
    """The store's, as the cluster file or the environment says, or of the Valkey that `warmroute
    up --remote` started with this state; empty for none."""
    folder = state / "valkey"
    if kv.remote or not folder.exists():
        return kv.remote
    from kvstore.remote.server import written_url

    return written_url(folder)


def purged(url: str, cluster_key: bytes, owner: bytes | None) -> int:
    """How many blocks of `owner` were removed there; for None those of this cluster, whichever life
    of it wrote them: another cluster may share the store. Raises CommandError."""
    whose = Signed(block_mac_key(cluster_key)) if owner is None else owner
    try:
        tier = build_tier(url, secret=cluster_key)
    except (ValueError, StoreError) as error:
        raise CommandError(f"kv.remote: {error}") from None
    try:
        read = Read(secrets.token_bytes(KEY_BYTES), memoryview(bytearray(KEY_BYTES)))
        (outcome,) = tier.get([read], time.monotonic() + LOOK_S).result(2 * LOOK_S)
        if outcome.status is Status.FAILED:
            raise CommandError("the store for all hosts does not answer: what is there stays")
        return tier.purge(whose)
    finally:
        tier.close()
