"""Every setting of every process, typed, with default and unit. One file, one cluster."""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec.inspect import FloatType, IntType, StrType, StructType, type_info

DeadlineClass = Literal["interactive", "standard", "batch"]
Degradation = Literal["max_tokens", "n", "logprobs", "batch"]
Batching = Literal["continuous", "static"]
Eviction = Literal["segmented", "lru"]
Role = Literal["both", "prefill", "decode"]
HeldWeights = Literal["dense", "q4"]
ServiceOrder = Literal["fcfs", "priority", "deadline"]

_Count = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
_Some = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
_Bytes = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
_Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
_Seconds = Annotated[float, msgspec.Meta(gt=0.0, le=86_400.0)]
_Millis = Annotated[float, msgspec.Meta(gt=0.0, le=86_400_000.0)]
_Delay = Annotated[float, msgspec.Meta(ge=0.0, le=86_400_000.0)]
_Span = Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
_Ratio = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
"""Not-a-number is outside all of these bounds too."""

WARM_SHARE = 0.5
"""Of a replica's KV blocks: what one tenant keeps while others need room."""

_HashOrNone = Annotated[str, msgspec.Meta(pattern="^([0-9a-fA-F]{64})?$")]


Bounds = IntType | FloatType | StrType


@cache
def _bounded(section: type[Section]) -> tuple[tuple[str, Bounds], ...]:
    """Names and bounds of a section's numbers and texts."""
    info = type_info(section)
    assert isinstance(info, StructType)
    return tuple(
        (field.name, field.type) for field in info.fields if isinstance(field.type, Bounds)
    )


def _within(value: Any, bounds: Bounds) -> bool:
    if isinstance(bounds, StrType):
        return isinstance(value, str) and re.search(bounds.pattern or "", value) is not None
    kinds = (int,) if isinstance(bounds, IntType) else (int, float)
    return (
        isinstance(value, kinds)
        and not isinstance(value, bool)
        and (bounds.ge is None or value >= bounds.ge)
        and (bounds.gt is None or value > bounds.gt)
        and (bounds.le is None or value <= bounds.le)
    )


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings within their bounds, however they were made: what is read from a file is checked
    while it is read, and this is for what is made in Python. Raises ValueError."""

    def __post_init__(self) -> None:
        for name, bounds in _bounded(type(self)):
            if not _within(getattr(self, name), bounds):
                raise ValueError(f"{name}: {getattr(self, name)!r} is not within its bounds")


class ModelConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`path`: a GGUF file or a folder with safetensors. `name`: what clients call the model."""

    path: str
    name: str = "smollm2-135m-instruct"


class AdapterConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A LoRA adapter of the model. `name`: the model that clients ask for; `path`: a folder as PEFT
    saves it. `replicas` serve it; empty for all that serve the model itself."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$")]
    path: str
    replicas: tuple[str, ...] = ()


class TlsConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Paths of PEM files: one's own certificate and key, and the authority that signed those of
    the other side; without `ca` nobody is asked for a certificate."""

    cert: str
    key: str
    ca: str = ""


class BusConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where NATS is. Credentials are per role: `user` publishes under its own subjects only.

    `tls_ca`: path of the authority (PEM) that signed the server's certificate. With it nothing is
    said without TLS; the server needs `handshake_first` in its `tls` section.
    """

    url: str = "nats://127.0.0.1:4222"
    user: str = ""
    password: str = ""
    tls_ca: str = ""


class ReplicaConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine replica. `revision`: one of the cluster's revisions; empty for the model itself.

    dtype: "auto" is bfloat16 where the CPU has AMX or AVX512-BF16 (or on CUDA), else float32.
    weights: "dense" makes numbers in `dtype` of what the file holds. "q4" keeps the blocks of a
    GGUF file with Q4_1 weights (and its Q8_0) as they are: less memory to hold and read.
    kernel: "auto" takes the native CPU kernel where a compiler is found, "torch" never does.
    order: who is served first: "deadline" (priority, slack, then the tenants' shares; refuses early
    what can't be in time), "priority" (then arrival) or "fcfs". shadow_order: only counted beside.
    eviction: "segmented" keeps cached blocks that were used again out of reach of those that were
    not; "lru" is there for comparison. So is prefix_cache false (every prompt is computed whole),
    and batching "static" (nobody joins those that run once one of them writes its answer).
    kv_events, kv_events_replay: ZMQ addresses on this machine (tcp://127.0.0.1:5557, ipc://...) at
    which the cache's changes are published as vLLM does, token ids in clear; empty for none.
    itl_target_ms: while answers are being written, prompts are computed in pieces small enough that
    a step ends by then; 0 for pieces of `max_step_tokens`.
    overlap: the next step is planned while one executes, on a thread of its own.
    role: "prefill" computes long prompts for others, "decode" answers, as far as the objectives of
    requests for the gaps between tokens ask for it; "both" does everything.
    retract_every_steps: for tests, somebody loses its KV every so many steps; 0 for never.
    max_adapters: LoRA adapters in memory at once; max_adapters_per_batch: different ones among the
    requests that run at once.
    """

    id: str
    role: Role = "both"
    host: str = "127.0.0.1"
    port: _Port = 0
    device: str = "cpu"
    dtype: str = "auto"
    weights: HeldWeights = "dense"
    kernel: str = "auto"
    threads: _Some = 1
    block_tokens: _Some = 16
    kv_blocks: _Some = 2048
    context_tokens: _Some = 8192
    max_running: _Some = 32
    max_step_tokens: _Some = 512
    itl_target_ms: _Delay = 200.0
    overlap: bool = False
    retract_every_steps: _Count = 0
    max_waiting_tokens: _Some = 262_144
    order: ServiceOrder = "deadline"
    shadow_order: ServiceOrder | Literal[""] = ""
    eviction: Eviction = "segmented"
    prefix_cache: bool = True
    batching: Batching = "continuous"
    revision: str = ""
    digest_bits: _Some = 65_536
    digest_k: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8
    digest_tick_ms: _Millis = 50.0
    heartbeat_ms: _Millis = 250.0
    hello_ms: _Millis = 2_000.0
    mailbox_bytes: _Bytes = 262_144
    mailboxes_bytes: _Bytes = 64 * 1024 * 1024
    drain_s: _Span = 20.0
    kv_events: str = ""
    kv_events_replay: str = ""
    max_adapters: _Some = 8
    max_adapters_per_batch: _Some = 4


class KvConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where KV blocks go besides the device, and come back from.

    `host`: "auto" or "inproc" (this process's own memory), "off", or the path of a kvd's socket, as
    `warmroute up` has it. `host_bytes`: how much the host's store may hold. `remote`: the URL of a
    store for all hosts, empty for none; its blocks live `remote_ttl_s` after their last use (in S3
    after they were written, in LMCache as long as its server likes), and with `remote_seal` only
    who knows the cluster's secret can read them (AES-GCM, a key a tenant). `peers`: URLs of other
    hosts' stores, which are only read. A load that takes longer than `load_deadline_ms` is given
    up, and a question longer than `lookup_ms`. One of `check_one_in` loads is compared with what is
    computed here; 0 compares none.

    Of kvd: one tenant may take `tenant_share` of it. With a `peer_host` it serves blocks to hosts
    that know the cluster's secret, and with a `metrics_port` Prometheus on loopback. `peer_tls`:
    hosts show each other certificates of its `ca` as well, and blocks travel encrypted.
    """

    host: str = "auto"
    host_bytes: _Bytes = 512 * 1024 * 1024
    remote: str = ""
    remote_ttl_s: _Seconds = 86_400.0
    remote_seal: bool = False
    peers: tuple[str, ...] = ()
    staging_bytes: _Bytes = 64 * 1024 * 1024
    load_deadline_ms: _Millis = 2_000.0
    lookup_ms: _Millis = 100.0
    write_deadline_ms: _Millis = 5_000.0
    check_one_in: _Count = 256
    tenant_share: _Ratio = 0.5
    peer_host: str = ""
    peer_port: _Port = 0
    peer_tls: TlsConfig | None = None
    metrics_port: _Port = 0


class BackendConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An OpenAI-compatible server of another kind (vLLM, SGLang, ...) as a replica.

    `url`: http(s)://host:port, without /v1. `model`: its own name for the model, empty for ours.
    `api_key_env`: the environment variable that holds its key. `events`: "bridge" where `warmroute
    bridge` tells of its cache; with "none" what was sent there is all that is known. A replica with
    the same `block_tokens` and `dtype` shares its pool. 0 means unknown, or as the model allows.
    `cache_salt` sends the field that keeps the tenants' blocks apart. `structured`: the server
    enforces `response_format`, `structured_outputs` and `tool_choice`. `idle_connection_s` must be
    below the server's keep-alive.
    """

    id: str
    url: str
    model: str = ""
    api_key_env: str = ""
    events: Literal["none", "bridge"] = "none"
    block_tokens: _Some = 16
    dtype: str = "bfloat16"
    context_tokens: _Count = 0
    kv_blocks: _Count = 0
    max_running: _Some = 256
    cache_salt: bool = True
    structured: bool = False
    idle_connection_s: _Seconds = 2.0


class TenantPolicy(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one tenant may use, and how it is served. A limit of 0 is none.

    `tokens_per_min` counts prompts and expected answers, corrected by what came. `weight` is the
    share of a busy fleet, `priority` (higher first) goes before any share. `ttft_deadline_ms` 0
    takes that of the class, and so does `itl_deadline_ms`, for the gaps between an answer's tokens
    in the mean. `degrade`: what may be made less of this tenant's requests when much
    is waiting. `warm_share`: of each replica's KV blocks; a tenant that holds more loses its
    own idle ones first, as soon as anybody needs room.
    """

    requests_per_min: _Count = 0
    tokens_per_min: _Count = 0
    max_concurrent: _Count = 0
    weight: Annotated[float, msgspec.Meta(ge=0.01, le=1_000.0)] = 1.0
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    deadline_class: DeadlineClass = "standard"
    ttft_deadline_ms: _Delay = 0.0
    itl_deadline_ms: _Delay = 0.0
    degrade: tuple[Degradation, ...] = ()
    warm_share: _Ratio = WARM_SHARE


class TenantConfig(TenantPolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`key_sha256`: hex digests of the tenant's API keys. `scope`: "private" or "group:<name>".

    The name "anonymous" gives a policy to whoever comes without a key.
    """

    name: str
    key_sha256: tuple[str, ...] = ()
    scope: str = "private"


class RouterConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gateway. `admin_key_sha256` guards /router's changing routes; empty closes them.

    `link_hosts`: hosts beyond loopback on which replicas may announce their link. `shadow_policy`:
    scores live traffic beside `policy` and routes nothing; empty for none. `max_inflight_tokens`
    bounds prompts and answers inside: an answer counts for `expected_answer_tokens`, or less where
    less was asked for, until it has come to more. `max_reading_bytes`
    bounds the bodies that are being read. `prefill_ahead_ms`: how much prefill may lie before a
    request at a replica, where longer prompts don't count; the rest waits in the router, where
    `max_queued_requests` and `max_queued_tokens` bound it, one tenant's at half of that. A stream
    gets a comment whenever nothing was sent on it for `keepalive_s`, waiting for its turn included.
    `tls`: serve HTTPS.

    Where replicas have roles: a prompt of which fewer than `split_min_tokens` must be computed is
    short, and never worth a hand-off from one that computes to one that answers; and one that
    answers is sent no more than `split_decode_share` of what it runs at once.
    """

    id: str = "router-0"
    host: str = "127.0.0.1"
    port: _Port = 8000
    policy: str = "warmroute"
    shadow_policy: str = ""
    admin_key_sha256: _HashOrNone = ""
    link_hosts: tuple[str, ...] = ()
    tls: TlsConfig | None = None
    allow_anonymous: bool = True
    max_body_bytes: _Bytes = 8 * 1024 * 1024
    max_reading_bytes: _Bytes = 256 * 1024 * 1024
    max_connections: _Some = 2_000
    max_inflight_tokens: _Tokens = 1_000_000
    expected_answer_tokens: _Some = 1_024
    prefill_ahead_ms: _Delay = 100.0
    max_queued_requests: _Some = 1_000
    max_queued_tokens: _Tokens = 500_000
    request_timeout_s: _Seconds = 600.0
    first_token_timeout_s: _Seconds = 120.0
    stream_buffer_bytes: _Bytes = 262_144
    slow_reader_s: _Seconds = 30.0
    keepalive_s: _Seconds = 15.0
    retries: Annotated[int, msgspec.Meta(ge=0, le=100)] = 2
    decisions_kept: _Some = 1_024
    replicate: bool = True
    replicate_share: _Ratio = 0.05
    split_min_tokens: _Count = 256
    split_decode_share: _Ratio = 0.9
    drain_s: _Span = 20.0


class RevisionConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another revision of the model, served beside it under its name by replicas of its own.

    `path`: as the model's. `weight`: its share of the requests; the model itself has the rest.
    `mirror`: the share of the other requests that are copied to it, for comparison. It loses its
    weight when its TTFT p90 passes `slo_ttft_ms` (0: no bound), or its share of failed attempts
    `slo_error_ratio`.
    """

    name: str
    path: str
    weight: _Ratio = 0.0
    mirror: _Ratio = 0.0
    slo_ttft_ms: _Delay = 0.0
    slo_error_ratio: _Ratio = 1.0


class ClusterConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cluster. `secret` (hex, 32 bytes) keys block identity and authenticates the link.

    `link_tls`: routers and replicas show each other certificates of its `ca`, beside the secret.
    """

    cluster: str = "local"
    secret: str
    model: ModelConfig
    bus: BusConfig = BusConfig()
    link_tls: TlsConfig | None = None
    kv: KvConfig = KvConfig()
    router: RouterConfig = RouterConfig()
    replicas: tuple[ReplicaConfig, ...] = ()
    backends: tuple[BackendConfig, ...] = ()
    tenants: tuple[TenantConfig, ...] = ()
    revisions: tuple[RevisionConfig, ...] = ()
    adapters: tuple[AdapterConfig, ...] = ()
