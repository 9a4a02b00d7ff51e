"""What one replica's device holds: where its memory goes, how many blocks, how many requests."""

from __future__ import annotations

import math
from dataclasses import dataclass

from configs.model.kept import NOTHING_KEPT
from configs.schema import HeldWeights
from replica.sched.ledger import HEADROOM_SHARE
from tools.doctor.sizes import ModelSize

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
MIB = 1 << 20
COLLECTIVE_BYTES = 64 * MIB
"""Buffers of a collective library, once a device takes part in tensor parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How the model is to be served. `kv_blocks` 0: as many as the memory allows. `reserve_bytes`:
    captured graphs and workspaces of kernels, on a GPU. `copies_head`: a tied head is laid out anew
    for its kernel, so that it takes memory of its own (so it is on a CPU). `weights`: as a
    replica's. `adapters`: as many LoRA adapters as may be in memory, of `adapter_rank` and
    `adapter_bytes` each."""

    dtype: str
    kv_dtype: str
    block_tokens: int
    kv_blocks: int
    max_running: int
    max_step_tokens: int
    horizon_tokens: int
    memory_bytes: int
    tensor_parallel: int = 1
    weights_bytes: int = 0
    reserve_bytes: int = 0
    copies_head: bool = False
    weights: HeldWeights = "dense"
    adapters: int = 0
    adapter_rank: int = 0
    adapter_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """One line of the sum; `how` is its formula."""

    name: str
    bytes: int
    how: str


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of one device. `blocks` can be planned; one more, the dump, takes padding."""

    setup: Setup
    kv_bytes_per_token: int
    blocks: int
    shares: tuple[Share, ...]

    @property
    def bytes(self) -> int:
        """All in all."""
        return sum(share.bytes for share in self.shares)

    @property
    def tokens(self) -> int:
        """What the pool holds."""
        return self.blocks * self.setup.block_tokens

    @property
    def waste_bytes(self) -> float:
        """Of one sequence in the mean: the empty part of its last block."""
        return (self.setup.block_tokens - 1) / 2 * self.kv_bytes_per_token

    @property
    def watermark_blocks(self) -> int:
        """What a newcomer leaves at most for those that run: their next tokens, up to the
        scheduler's horizon."""
        setup = self.setup
        return setup.max_running * math.ceil(setup.horizon_tokens / setup.block_tokens)

    def blocks_of(self, prompt_tokens: int, output_tokens: int, shared_tokens: int = 0) -> int:
        """What one request takes for itself at its end. Its last token is never fed back."""
        size = self.setup.block_tokens
        return math.ceil((prompt_tokens + output_tokens - 1) / size) - shared_tokens // size

    def concurrency(self, prompt_tokens: int, output_tokens: int, shared_tokens: int = 0) -> int:
        """Requests of known length that the scheduler lets run side by side to their end;
        `shared_tokens` of their prompts are the same. Beside others one leaves some blocks for
        emergencies, and counts with an empty tail of its last block."""
        size = self.setup.block_tokens
        shared = shared_tokens // size
        if self.blocks < shared + self.blocks_of(prompt_tokens, output_tokens, shared_tokens):
            return 0
        left = self.blocks - shared - self.headroom_blocks
        own_tokens = prompt_tokens - shared * size + output_tokens + size - 1
        # Of all these tokens together not a whole block may be missing.
        return max(1, min(self.setup.max_running, ((left + 1) * size - 1) // own_tokens))

    @property
    def headroom_blocks(self) -> int:
        """What stays free when a newcomer is let in beside others."""
        return self.blocks // HEADROOM_SHARE


def capacity(model: ModelSize, setup: Setup, draft: ModelSize | None = None) -> Capacity:
    """The sum. Without `kv_blocks` the KV takes what the rest leaves, which may be nothing."""
    element, kv_element = ELEMENT_BYTES[setup.dtype], ELEMENT_BYTES[setup.kv_dtype]
    parallel = setup.tensor_parallel
    fixed = (
        _weights(model, setup, element),
        Share(
            "activations",
            model.activation_bytes(setup.max_step_tokens, setup.max_running, element, parallel),
            f"{setup.max_step_tokens} tokens a step, {setup.max_running} rows of logits",
        ),
        *_draft(draft, element),
        Share(
            "adapters",
            setup.adapters * setup.adapter_bytes,
            f"{setup.adapters} of rank {setup.adapter_rank}, {setup.adapter_bytes:,} bytes each",
        ),
        *_parallel(model, setup, element),
        Share("graphs and workspaces", setup.reserve_bytes, "as reserved"),
    )
    per_token = model.kv_numbers(parallel) * kv_element
    if draft is not None:
        per_token += draft.kv_numbers(1) * kv_element
    block_bytes = per_token * setup.block_tokens
    left = setup.memory_bytes - sum(share.bytes for share in fixed)
    blocks = setup.kv_blocks or max(0, left // block_bytes - 1)
    how = f"{blocks} + 1 blocks of {setup.block_tokens} tokens, {block_bytes:,} bytes each"
    kv = Share("KV", (blocks + 1) * block_bytes if blocks else 0, how)
    shares = tuple(share for share in (kv, *fixed) if share.bytes)
    return Capacity(setup, per_token, blocks, shares)


def _weights(model: ModelSize, setup: Setup, element: int) -> Share:
    if setup.weights_bytes:
        return Share("weights", setup.weights_bytes, "as given")
    kept = model.kept if setup.weights == "q4" else NOTHING_KEPT
    numbers = model.parameters - kept.parameters
    how = f"{numbers / 1e6:,.1f} million x {element}"
    if kept.parameters:
        how = f"{kept.parameters / 1e6:,.1f} million in {kept.bytes:,} bytes of blocks, {how}"
    if setup.copies_head and model.tied_head and not kept.embedding:
        numbers += model.vocab * model.hidden
        how += ", the tied head twice"
    parallel = setup.tensor_parallel
    size = (kept.bytes + numbers * element) // parallel
    return Share("weights", size, how + _over(parallel))


def _draft(draft: ModelSize | None, element: int) -> tuple[Share, ...]:
    if draft is None:
        return ()
    text = f"{draft.parameters / 1e6:,.1f} million x {element}; its KV is in every block"
    return (Share("draft model", draft.parameters * element, text),)


def _parallel(model: ModelSize, setup: Setup, element: int) -> tuple[Share, ...]:
    if setup.tensor_parallel == 1:
        return ()
    each = setup.max_step_tokens * model.hidden * element
    text = f"2 x {setup.max_step_tokens} tokens x {model.hidden}, and the library's own"
    return (Share("communication", 2 * each + COLLECTIVE_BYTES, text),)


def _over(parallel: int) -> str:
    return f" over {parallel} devices" if parallel > 1 else ""
