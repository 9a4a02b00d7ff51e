"""What the daemon is told: by flags, or by a cluster file's [kv] section."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.load import ConfigError, load_cluster
from configs.schema import ClusterConfig, TlsConfig
from events.secrets import parse_secret
from kvstore.arena.available import default_bytes


@dataclass(frozen=True, slots=True)
class KvdSettings:
    """`arena_bytes` is taken at the start. Without a `peer_host` other hosts are not served; with
    one, `secret` is what they show that they know, and with `peer_tls` certificates as well. A
    `metrics_port` of 0 serves no metrics."""

    socket: Path
    arena_bytes: int
    tenant_share: float = 0.5
    peer_host: str = ""
    peer_port: int = 0
    secret: bytes = b""
    peer_tls: TlsConfig | None = None
    metrics_port: int = 0
    die_with_parent: bool = False


def settings_of(argv: Sequence[str] | None) -> KvdSettings:
    """Flags win over the file. Raises ConfigError; ends the process on a wrong flag."""
    flags = _parser().parse_args(argv)
    found = KvdSettings(Path(), 0) if flags.config is None else _of_file(load_cluster(flags.config))
    socket = flags.socket or found.socket
    if socket == Path():
        raise ConfigError("--socket or --config must say where users find it")
    return KvdSettings(
        socket=socket,
        arena_bytes=flags.bytes or found.arena_bytes or default_bytes(),
        tenant_share=flags.tenant_share or found.tenant_share,
        peer_host=found.peer_host,
        peer_port=found.peer_port,
        secret=found.secret,
        peer_tls=found.peer_tls,
        metrics_port=flags.metrics_port or found.metrics_port,
        die_with_parent=flags.die_with_parent,
    )


def _of_file(cluster: ClusterConfig) -> KvdSettings:
    kv = cluster.kv
    if kv.host in ("auto", "inproc", "off"):
        raise ConfigError(f"kv.host '{kv.host}': kvd needs the path of its socket there")
    return KvdSettings(
        socket=Path(kv.host),
        arena_bytes=kv.host_bytes,
        tenant_share=kv.tenant_share,
        peer_host=kv.peer_host,
        peer_port=kv.peer_port,
        secret=parse_secret(cluster.secret),
        peer_tls=kv.peer_tls,
        metrics_port=kv.metrics_port,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvstore.kvd", description="A host's shared KV memory.")
    add = parser.add_argument
    add("--config", type=Path, help="the cluster file (TOML), whose [kv] section counts")
    add("--socket", type=Path, help="where users find it")
    add("--bytes", type=int, help="how much memory it takes (default: a part of what is free)")
    add("--tenant-share", type=float, help="how much of it one tenant may take (default: 0.5)")
    add("--metrics-port", type=int, help="Prometheus metrics on this port of 127.0.0.1")
    add("--die-with-parent", action="store_true", help="stop when the parent ends")
    return parser
