"""Puts a replica's tiers together from its settings."""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence
from pathlib import Path

from configs.load import ConfigError
from configs.schema import KvConfig
from events.secrets import block_mac_key, store_name
from events.tls import check_mutual, client_context
from kvstore.arena.arena import Arena
from kvstore.arena.limits import ArenaLimits
from kvstore.arena.segment import Segment, round_up
from kvstore.arena.tier import ArenaTier
from kvstore.cascade import Cascade
from kvstore.doorkeeper import Doorkeeper
from kvstore.errors import StoreError
from kvstore.identity import Namespace
from kvstore.kvd.client import open_tier
from kvstore.kvd.place import host_store_name
from kvstore.layout import Layout
from kvstore.level import Level
from kvstore.remote.build import build_tier
from kvstore.seal import Sealer
from kvstore.sealed import SealedTier
from kvstore.tier import Tier
from kvstore.verify import Verifier
from replica.tiers.loader import Loader, LoadSettings
from replica.tiers.mover import BlockMover
from replica.tiers.outbound import BATCH_BLOCKS, Outbound, OutSettings
from replica.tiers.spotcheck import SpotCheck
from replica.tiers.staging import Staging
from replica.tiers.tiers import ReplicaTiers

MAX_KNOWN = 65_536
"""Blocks of one tier that readers are told of: more would make every digest larger."""

MIN_SLOTS = 4
MAX_SLOTS = 1_024


def build_tiers(
    config: KvConfig, cluster_key: bytes, namespace: Namespace, mover: BlockMover
) -> ReplicaTiers | None:
    """The tiers below the device; None where there shall be none. Raises ConfigError."""
    near, far = host_tier(config), remote_tier(config, cluster_key, Layout.of(namespace.layout))
    tls = None
    if config.peer_tls is not None:
        check_mutual(config.peer_tls, "kv.peer_tls")
        tls = client_context(config.peer_tls)
    peers = [named_tier(url, cluster_key, None, tls) for url in config.peers]
    if near is None and far is None and not peers:
        return None
    return assemble(config, cluster_key, namespace, mover, near, far, peers)


def assemble(
    config: KvConfig,
    cluster_key: bytes,
    namespace: Namespace,
    mover: BlockMover,
    near: Tier | None,
    far: Tier | None,
    peers: Sequence[Tier] = (),
) -> ReplicaTiers:
    """Everything around the host's tier, the peers, which are only read, and the remote tier."""
    layout = Layout.of(namespace.layout)
    verifier, mac_key = Verifier(cluster_key, layout), block_mac_key(cluster_key)
    near_level = far_level = None
    shown = []
    if near is not None:
        fits = config.host_bytes // layout.payload_bytes
        near_level = Level(near, layout, verifier, mac_key, max_known=min(fits, MAX_KNOWN))
        if isinstance(near, ArenaTier):
            near.follow(near_level.known)
        shown.append((host_name(near, config), near_level))
    if far is not None:
        ttl_s = config.remote_ttl_s
        far_level = Level(far, layout, verifier, mac_key, ttl_s, max_known=MAX_KNOWN)
        shown.append((store_name(cluster_key, config.remote), far_level))
    spot = SpotCheck(layout, config.check_one_in)
    others = [Level(peer, layout, verifier, mac_key) for peer in peers]
    for number, level in enumerate(others[1:], 2):
        level.name = f"{level.name}-{number}"
    levels = [level for level in (near_level, *others, far_level) if level is not None]
    cascade = Cascade(levels)
    slots = min(max(config.staging_bytes // layout.payload_bytes, MIN_SLOTS), MAX_SLOTS)
    loader = Loader(
        cascade,
        Staging(slots, layout.payload_bytes),
        mover,
        spot,
        cluster_key,
        namespace,
        layout.payload_bytes,
        LoadSettings(config.load_deadline_ms / 1e3, config.lookup_ms / 1e3),
    )
    outbound = Outbound(
        near_level,
        far_level,
        Doorkeeper(),
        mover,
        Staging(2 * BATCH_BLOCKS, layout.payload_bytes),
        spot,
        cluster_key,
        namespace,
        OutSettings(time.time_ns() // 1_000_000, config.write_deadline_ms / 1e3),
    )
    reached = [(peer, level) for peer, level in zip(peers, others, strict=True)]
    return ReplicaTiers(cascade, loader, outbound, spot, shown, reached)


def host_name(near: Tier, config: KvConfig) -> str:
    """Replicas that say the same name share the host's store; one of its own has none to say."""
    return host_store_name(config.host) if near.caps.shared else ""


def host_tier(config: KvConfig) -> Tier | None:
    """The host's store. Raises ConfigError."""
    if config.host == "off":
        return None
    if config.host in ("auto", "inproc"):
        segment = Segment.private(round_up(config.host_bytes))
        return ArenaTier.local(Arena(segment, ArenaLimits(scope_share=config.tenant_share)))
    if not config.host.startswith("/"):
        raise ConfigError(f"kv.host '{config.host}': auto, inproc, off, or the path of a socket")
    try:
        return open_tier(Path(config.host), "replica")
    except StoreError as error:
        raise ConfigError(f"kv.host: {error}") from error


def remote_tier(config: KvConfig, cluster_key: bytes, layout: Layout) -> Tier | None:
    """The store for all hosts. Raises ConfigError."""
    if not config.remote:
        return None
    store = named_tier(config.remote, cluster_key, config.remote_ttl_s)
    if not config.remote_seal:
        return store
    return SealedTier(store, Sealer(cluster_key, layout, block_mac_key(cluster_key)))


def named_tier(
    url: str, cluster_key: bytes, ttl_s: float | None, peer_tls: ssl.SSLContext | None = None
) -> Tier:
    """The store that a URL names. Raises ConfigError."""
    try:
        return build_tier(url, secret=cluster_key, ttl_s=ttl_s, peer_tls=peer_tls)
    except (ValueError, StoreError) as error:
        raise ConfigError(f"[kv]: {error}") from error
