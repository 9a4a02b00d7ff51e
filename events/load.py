"""Hello, load and bye: what a replica says about itself on the bus."""

from __future__ import annotations

import msgspec

from events.numbers import Amount, Count

OWN_ENGINE = "warmroute"
BOTH, PREFILL, DECODE = "both", "prefill", "decode"
"""What a replica is there for; an unknown word counts as BOTH."""


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal for two replicas to be able to read each other's KV."""

    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    rope: str


class DigestShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`bits` is a power of two; `k` positions are set per key.

    A digest may have `columns` of so many bits each, back to back: the device's blocks, then those
    of each tier below it, in the order of the hello's `tiers`.
    """

    bits: int
    k: int
    columns: int = 1

    @property
    def total_bits(self) -> int:
        """Of all columns."""
        return self.bits * self.columns

    @property
    def column(self) -> DigestShape:
        """The shape of one column."""
        return self if self.columns == 1 else DigestShape(bits=self.bits, k=self.k)


class AdapterNote(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter that a replica serves, by name and content digest (hex). Where it is not
    `resident`, in memory, its first request waits about `load_ms` for it. `failing`: its last load
    failed, and for a while it isn't to be had there."""

    name: str
    digest: str
    resident: bool
    load_ms: Amount
    failing: bool = False


class ReplicaHello(msgspec.Struct, frozen=True, kw_only=True):
    """Sent at start, on request and every few seconds. Fingerprints are hex digests.
    `max_step_tokens`: how much of a prompt one step computes at most.

    `tiers`: the stores below its device whose blocks its digest shows, by name; what several
    replicas show of one store is theirs together. An empty name is a store of its own. `peers`:
    stores of other hosts that it can read, which others show; empty where the name is not known.

    Another `engine` than ours is asked by HTTP: its `link_url` is the server's base URL. Without
    `digests` nobody will ever tell what it holds. `abilities`: words for what not every replica
    can do; a request that needs one goes only where it is named. `role`: PREFILL computes prompts
    that others answer, DECODE answers and gets no long cold prompts, as far as others are there.
    `adapters`: a request that names one goes only where it is served. `itl_target_ms`: while
    answers are written, a step in which a prompt is computed takes about so long at most; 0 where
    nothing is said of that.
    """

    model: str
    weights: str
    tokenizer: str
    template: str
    layout: KVLayout
    hash_version: str
    key_id: str
    digest: DigestShape
    link_url: str
    context_tokens: Count
    total_blocks: Count
    max_running: Count
    device: str
    version: str
    max_step_tokens: Count = 512
    engine: str = OWN_ENGINE
    digests: bool = True
    tiers: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    abilities: tuple[str, ...] = ()
    role: str = BOTH
    adapters: tuple[AdapterNote, ...] = ()
    itl_target_ms: Amount = 0.0


class PrefillFit(msgspec.Struct, frozen=True, array_like=True):
    """Prefill time in ms of Q new tokens after P cached ones: a + b*Q + c*(P*Q + Q(Q+1)/2)."""

    a: float
    b: float
    c: float
    confidence: float

    def predict_ms(self, cached_tokens: float, new_tokens: float) -> float:
        """Predicted prefill time; never negative."""
        p, q = cached_tokens, new_tokens
        return max(0.0, self.a + self.b * q + self.c * (p * q + q * (q + 1) / 2))


class DecodeFit(msgspec.Struct, frozen=True, array_like=True):
    """Decode step time in ms for a batch: base + per_row*rows + per_context*context_tokens."""

    base: float
    per_row: float
    per_context: float
    confidence: float

    def predict_ms(self, rows: float, context_tokens: float) -> float:
        """Predicted time of one decode step; never negative."""
        return max(0.0, self.base + self.per_row * rows + self.per_context * context_tokens)


class FetchFit(msgspec.Struct, frozen=True, array_like=True):
    """Time in ms to bring n blocks from a tier to the device: latency + per_block*n."""

    latency: Amount
    per_block: Amount


class WarmBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one tenant that a replica holds; `tenant`: see events.secrets.tenant_tag."""

    tenant: bytes
    blocks: Count


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The heartbeat. `digest_seq` lets a reader notice that the last delta was lost.

    `seen` maps a router's boot to the last dispatch number of it that this report includes.
    `queued_prefill_tokens` counts prompt tokens not yet computed of waiting and running requests,
    after subtracting what the cache holds. `fetch` goes with the hello's `tiers`, then its `peers`.
    `warm`: of the tenants that hold most, blocks that others use as well left out; None where the
    replica does not tell.
    """

    digest_generation: Count
    digest_seq: Count
    waiting: Count
    running: Count
    queued_prefill_tokens: Count
    running_context_tokens: Count
    free_blocks: Count
    cached_blocks: Count
    total_blocks: Count
    step_ms: Amount
    prefill: PrefillFit
    decode: DecodeFit
    seen: dict[str, int]
    draining: bool
    engine_steps: Count
    digest_false_positive_rate: Amount
    prompt_tokens_total: Count
    cached_tokens_total: Count
    preemptions_total: Count
    fetch: tuple[FetchFit, ...] = ()
    warm: tuple[WarmBlocks, ...] | None = None


def silent_load(total_blocks: int) -> ReplicaLoad:
    """Nothing waits, nothing runs, as far as the replica says; no digest is named."""
    return ReplicaLoad(
        digest_generation=-1,
        digest_seq=-1,
        waiting=0,
        running=0,
        queued_prefill_tokens=0,
        running_context_tokens=0,
        free_blocks=total_blocks,
        cached_blocks=0,
        total_blocks=total_blocks,
        step_ms=0.0,
        prefill=PrefillFit(0.0, 0.0, 0.0, 0.0),
        decode=DecodeFit(0.0, 0.0, 0.0, 0.0),
        seen={},
        draining=False,
        engine_steps=0,
        digest_false_positive_rate=0.0,
        prompt_tokens_total=0,
        cached_tokens_total=0,
        preemptions_total=0,
    )


class ReplicaBye(msgspec.Struct, frozen=True, kw_only=True):
    """A replica leaves on purpose."""

    reason: str
