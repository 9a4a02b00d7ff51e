"""The backends of the cluster file, checked before anything is dialled, and what each one counts as
in the fleet: a replica of the router's own model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from configs.model.card import ModelCard
from configs.schema import BackendConfig, ClusterConfig
from events.grammar import GRAMMAR
from events.load import DigestShape, KVLayout, ReplicaHello
from events.subjects import check_id
from kvstore.identity import HASH_VERSION, key_id

ENGINE = "openai"
"""What a hello names instead of our own engine."""

UNKNOWN_BLOCKS = 1 << 20
NO_DIGEST = DigestShape(bits=1024, k=1)


@dataclass(frozen=True, slots=True)
class Backend:
    """One server that may be asked. `key` goes into its Authorization header and nowhere else."""

    config: BackendConfig
    url: str
    model: str
    key: str = ""

    @property
    def id(self) -> str:
        """Its id in the fleet."""
        return self.config.id

    @property
    def bridged(self) -> bool:
        """Whether a sidecar tells of its cache."""
        return self.config.events == "bridge"


def base_url(text: str) -> str:
    """http(s)://host:port without a slash at its end. Raises ValueError."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https"):
        raise ValueError("its url must begin with http:// or https://")
    if not parts.hostname or parts.username is not None or parts.query or parts.fragment:
        raise ValueError("its url must be http(s)://host:port")
    _ = parts.port
    return text.rstrip("/")


def roster(config: ClusterConfig, environ: Mapping[str, str] = os.environ) -> dict[str, Backend]:
    """The backends by id. The file names them, so their hosts are allowed; nothing else ever is.

    Raises ValueError that names the backend and what is wrong with it.
    """
    taken = {replica.id for replica in config.replicas}
    backends: dict[str, Backend] = {}
    for backend in config.backends:
        try:
            backends[backend.id] = _checked(backend, config.model.name, taken, environ)
        except ValueError as error:
            raise ValueError(f"backend '{backend.id}': {error}") from None
        taken.add(backend.id)
    return backends


def _checked(
    config: BackendConfig, model: str, taken: set[str], environ: Mapping[str, str]
) -> Backend:
    if check_id(config.id) in taken:
        raise ValueError("another replica or backend has this id")
    if config.block_tokens < 1:
        raise ValueError("block_tokens takes 1 or more")
    key = environ.get(config.api_key_env, "") if config.api_key_env else ""
    if config.api_key_env and not key:
        raise ValueError(f"the environment has no {config.api_key_env}")
    return Backend(config, base_url(config.url), config.model or model, key)


def hello_of(
    backend: Backend, cluster: ClusterConfig, card: ModelCard, digest: DigestShape = NO_DIGEST
) -> ReplicaHello:
    """What the backend would say of itself. That it runs this very model is its operator's word."""
    config, shape = backend.config, card.shape
    return ReplicaHello(
        model=cluster.model.name,
        weights=card.weights_fingerprint,
        tokenizer=card.tokenizer_fingerprint,
        template=card.template_fingerprint,
        layout=KVLayout(
            dtype=config.dtype,
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            block_tokens=config.block_tokens,
            rope=shape.rope,
        ),
        hash_version=HASH_VERSION,
        key_id=key_id(bytes.fromhex(cluster.secret)),
        digest=digest,
        link_url=backend.url,
        context_tokens=config.context_tokens or shape.context_tokens,
        total_blocks=config.kv_blocks or UNKNOWN_BLOCKS,
        max_running=config.max_running,
        device="foreign",
        version="",
        engine=ENGINE,
        digests=backend.bridged,
        abilities=(GRAMMAR,) if config.structured else (),
    )
