"""What a local cluster is made of: the user's choices, and the cluster file that follows."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from configs.schema import (
    AdapterConfig,
    BackendConfig,
    BusConfig,
    ClusterConfig,
    KvConfig,
    ModelConfig,
    ReplicaConfig,
    Role,
    RouterConfig,
    TenantConfig,
)
from kvstore.arena.available import default_bytes
from tools.errors import CommandError
from tools.up.state import ClusterState, sha256_hex

_LETTERS: dict[Role, str] = {"both": "r", "prefill": "p", "decode": "d"}


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What the user may choose. Ports of 0 are picked by the system; further routers listen on the
    ports behind `port`. A kvd is started where `kv` says "auto". Beside the `replicas` that do
    everything, so many of the other roles."""

    state: Path
    model: Path
    model_name: str
    cluster: str = "local"
    host: str = "127.0.0.1"
    port: int = 8000
    bus_port: int = 0
    replicas: int = 2
    prefill: int = 0
    decode: int = 0
    routers: int = 1
    backends: tuple[str, ...] = ()
    backend_model: str = ""
    cache_salt: bool = True
    bridge: bool = False
    policy: str = "warmroute"
    kv: KvConfig = field(default_factory=KvConfig)
    remote: bool = False
    replica_settings: Mapping[str, object] = field(default_factory=dict)
    adapters: Mapping[str, Path] = field(default_factory=dict)


def check_port_free(host: str, port: int) -> None:
    """Raises CommandError when somebody listens there already, or nobody can."""
    if port == 0:
        return
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            # With a name that nobody knows, or an address of another machine, no port helps.
            foreign = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
            flag = "--host" if foreign else "--port"
            raise CommandError(
                f"can't listen on {host}:{port} ({error.strerror}): choose another with {flag}"
            ) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`: then nobody needs a key."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def replica_roles(options: UpOptions) -> dict[str, Role]:
    """r0, r1, ... that do everything, p0, ... for prefill, d0, ... for decode."""
    counts: dict[Role, int] = {
        "both": options.replicas,
        "prefill": options.prefill,
        "decode": options.decode,
    }
    return {
        f"{_LETTERS[role]}{index}": role for role, count in counts.items() for index in range(count)
    }


def replica_names(options: UpOptions) -> tuple[str, ...]:
    """Of all roles."""
    return tuple(replica_roles(options))


def backend_names(options: UpOptions) -> tuple[str, ...]:
    """b0, b1, ..."""
    return tuple(f"b{index}" for index in range(len(options.backends)))


def backend_configs(options: UpOptions) -> tuple[BackendConfig, ...]:
    """Servers that run already. They share our replicas' pool where both say the same dtype."""
    dtype = options.replica_settings.get("dtype", "auto")
    shared = {"dtype": dtype} if dtype != "auto" else {}
    blocks = {"block_tokens": options.replica_settings.get("block_tokens", 16)}
    events = "bridge" if options.bridge else "none"
    return tuple(
        BackendConfig(
            id=name,
            url=url,
            model=options.backend_model,
            events=events,
            cache_salt=options.cache_salt,
            **shared,
            **blocks,  # type: ignore[arg-type]
        )
        for name, url in zip(backend_names(options), options.backends, strict=True)
    )


def router_names(options: UpOptions) -> tuple[str, ...]:
    """router-0, router-1, ..."""
    return tuple(f"router-{index}" for index in range(options.routers))


def router_ports(options: UpOptions) -> tuple[int, ...]:
    """Where each of them listens; 0 is any free port."""
    first = options.port
    return tuple(first + index if first else 0 for index in range(options.routers))


def kv_config(options: UpOptions, state: ClusterState) -> KvConfig:
    """With "auto" all replicas of this machine share one memory, which takes a part of what is
    free at most where nobody has given its size."""
    kv = options.kv
    if kv.host != "auto":
        return kv
    if not replica_names(options):
        return msgspec.structs.replace(kv, host="off")
    size = kv.host_bytes
    if size == KvConfig().host_bytes:
        size = min(size, default_bytes())
    return msgspec.structs.replace(kv, host=str(state.kvd_socket), host_bytes=size)


def cluster_config(options: UpOptions, state: ClusterState, bus_url: str) -> ClusterConfig:
    """The cluster file's content. Bus credentials are not in it: each child gets its own."""
    replicas = tuple(
        ReplicaConfig(id=name, role=role, **options.replica_settings)  # type: ignore[arg-type]
        for name, role in replica_roles(options).items()
    )
    return ClusterConfig(
        cluster=options.cluster,
        secret=state.keys.secret,
        model=ModelConfig(path=str(options.model), name=options.model_name),
        bus=BusConfig(url=bus_url),
        kv=kv_config(options, state),
        router=RouterConfig(
            host=options.host,
            port=options.port,
            policy=options.policy,
            admin_key_sha256=sha256_hex(state.keys.admin_key),
            allow_anonymous=is_loopback(options.host),
        ),
        replicas=replicas,
        backends=backend_configs(options),
        tenants=(TenantConfig(name="default", key_sha256=(sha256_hex(state.keys.api_key),)),),
        adapters=tuple(
            AdapterConfig(name=name, path=str(path)) for name, path in options.adapters.items()
        ),
    )
