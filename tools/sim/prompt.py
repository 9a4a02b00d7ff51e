"""A trace's prompt as tokens, and under whose name its blocks are hashed."""

from __future__ import annotations

import numpy as np

from tools.sim.call import Call

CLUSTER_KEY = bytes(32)
TENANT_SALT = b"simulated-tenant"


def prompt_ids(call: Call, block_tokens: int) -> np.ndarray:
    """uint32 (prompt_tokens,): every token of a block is the block's id, so that equal ids are
    equal tokens. The part of a block that ends a prompt may have no id."""
    tokens = np.repeat(call.blocks.astype(np.uint32), block_tokens)[: call.prompt_tokens]
    missing = call.prompt_tokens - len(tokens)
    return np.concatenate((tokens, np.full(missing, 2**31, np.uint32))) if missing else tokens
