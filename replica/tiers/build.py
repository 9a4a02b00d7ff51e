"""Puts a replica's tiers together from its settings."""

from __future__ import annotations

import logging
import time

from configs.load import ConfigError
from configs.schema import KvConfig
from events.secrets import block_mac_key
from kvstore.cascade import Cascade
from kvstore.doorkeeper import Doorkeeper
from kvstore.identity import Namespace
from kvstore.layout import Layout
from kvstore.level import Level
from kvstore.memory import MemoryTier
from kvstore.tier import Tier
from kvstore.verify import Verifier
from replica.tiers.loader import Loader, LoadSettings
from replica.tiers.mover import BlockMover
from replica.tiers.outbound import BATCH_BLOCKS, Outbound, OutSettings
from replica.tiers.spotcheck import SpotCheck
from replica.tiers.staging import Staging
from replica.tiers.tiers import ReplicaTiers

log = logging.getLogger(__name__)

MIN_SLOTS = 4
MAX_SLOTS = 1_024


def build_tiers(
    config: KvConfig, cluster_key: bytes, namespace: Namespace, mover: BlockMover
) -> ReplicaTiers | None:
    """The tiers below the device; None where there shall be none. Raises ConfigError."""
    near = host_tier(config)
    return None if near is None else assemble(config, cluster_key, namespace, mover, near, None)


def assemble(
    config: KvConfig,
    cluster_key: bytes,
    namespace: Namespace,
    mover: BlockMover,
    near: Tier | None,
    far: Tier | None,
) -> ReplicaTiers:
    """Everything around the host's tier and the remote one, of which one may be missing."""
    layout = Layout.of(namespace.layout)
    verifier, mac_key = Verifier(cluster_key, layout), block_mac_key(cluster_key)
    near_level = None if near is None else Level(near, layout, verifier, mac_key)
    far_level = None
    if far is not None:
        far_level = Level(far, layout, verifier, mac_key, ttl_s=config.remote_ttl_s)
    spot = SpotCheck(layout, config.check_one_in)
    cascade = Cascade([level for level in (near_level, far_level) if level is not None])
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
    return ReplicaTiers(cascade, loader, outbound, spot)


def host_tier(config: KvConfig) -> Tier | None:
    """The host's store. Raises ConfigError."""
    if config.host == "off":
        return None
    if config.host in ("auto", "inproc"):
        return MemoryTier(config.host_bytes)
    raise ConfigError(f"kv.host '{config.host}': not one of auto, inproc, off")
