"""What a simulated replica says of itself, and the limits that its scheduler keeps."""

from __future__ import annotations

from events.load import DigestShape, KVLayout, ReplicaHello
from kvstore.identity import HASH_VERSION
from replica.sched.ledger import Limits
from tools.sim.settings import Settings

CONTEXT_TOKENS = 1 << 23
BITS_PER_BLOCK = 16
MAX_WAITING_TOKENS = 1 << 40


def blocks_of(tokens: int, block_tokens: int) -> int:
    """What a pool of so many tokens has."""
    return max(2, tokens // block_tokens)


def make_hello(block_tokens: int, settings: Settings) -> ReplicaHello:
    """Of every replica of a simulation, but for its role."""
    blocks = blocks_of(settings.kv_tokens, block_tokens)
    most = max(blocks, *(blocks_of(tier.tokens, block_tokens) for tier in settings.tiers), 0)
    bits = 1 << max(10, (BITS_PER_BLOCK * most - 1).bit_length())
    layout = KVLayout(
        dtype="bfloat16", layers=1, kv_heads=1, head_dim=1, block_tokens=block_tokens, rope="sim"
    )
    return ReplicaHello(
        model="sim",
        weights="0" * 16,
        tokenizer="0" * 16,
        template="0" * 16,
        layout=layout,
        hash_version=HASH_VERSION,
        key_id="sim",
        digest=DigestShape(bits=bits, k=8, columns=1 + len(settings.tiers)),
        tiers=tuple(tier.store for tier in settings.tiers),
        link_url="ws://127.0.0.1:1/link",
        context_tokens=CONTEXT_TOKENS,
        total_blocks=blocks,
        max_running=settings.device.max_running,
        device="cpu" if settings.device.name.startswith("cpu") else "cuda",
        version="sim",
        max_step_tokens=settings.device.max_step_tokens,
        itl_target_ms=settings.itl_target_ms,
    )


def make_limits(hello: ReplicaHello, settings: Settings) -> Limits:
    """Of its scheduler."""
    device = settings.device
    return Limits(
        total_blocks=hello.total_blocks,
        block_tokens=hello.layout.block_tokens,
        context_tokens=CONTEXT_TOKENS,
        max_running=device.max_running,
        max_step_tokens=device.max_step_tokens,
        max_waiting_tokens=MAX_WAITING_TOKENS,
        itl_target_ms=settings.itl_target_ms,
    )
