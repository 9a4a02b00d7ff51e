"""The switches of the engine, each with the load on which it matters and the figure that shows it.

One mix for all would hide most of them: where nothing is evicted every order of eviction is the
same, and where nobody decodes no chunk holds anybody up. Where a figure doesn't depend on time
(`cached_ratio`), one user asks, so that it is the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.bench.engine.workload import Mix

POOL_TOKENS = 8_192
WHOLE = {"max_step_tokens": 8_192, "itl_target_ms": 0.0}


@dataclass(frozen=True, slots=True)
class Trial:
    """`switch`: of ReplicaConfig, what differs from the default. `figure`: of Outcome; `better`:
    whether more of it is."""

    switch: dict[str, Any]
    figure: str
    mix: Mix
    better: bool = False
    pool_tokens: int = POOL_TOKENS


_UNEVEN = Mix(requests=32, users=8, prefix=16, own=(16, 32), answer=(4, 72), long_one_in=0)
_INTERRUPTED = Mix(
    requests=24, users=6, prefix=16, own=(8, 24), answer=(40, 64), long_one_in=4, long=(700, 900)
)
_DECODING = Mix(requests=32, users=16, prefix=16, own=(8, 16), answer=(40, 48), long_one_in=0)
_SHARING = Mix(
    requests=20, users=4, groups=2, prefix=512, own=(8, 16), answer=(4, 8), long_one_in=0
)
_SCANNED = Mix(
    requests=24,
    users=1,
    groups=2,
    prefix=256,
    own=(8, 16),
    answer=(2, 2),
    long_one_in=2,
    long=(600, 900),
)
_BETWEEN = Mix(
    requests=16, users=1, groups=2, prefix=112, own=(8, 16), answer=(2, 2), long_one_in=0
)

CPU_RATE, GAP = "output_tokens_per_cpu_s", "itl_p99_ms"

TRIALS: dict[str, Trial] = {
    "static_batching": Trial({"batching": "static"}, CPU_RATE, _UNEVEN, better=True),
    "no_chunking": Trial(WHOLE, GAP, _INTERRUPTED),
    "fixed_chunks": Trial({"itl_target_ms": 0.0}, GAP, _INTERRUPTED),
    "no_prefix_cache": Trial({"prefix_cache": False}, "ttft_p50_ms", _SHARING),
    "overlap": Trial({"overlap": True}, "output_tokens_per_s", _DECODING, better=True),
    "lru_eviction": Trial(
        {"eviction": "lru"}, "cached_ratio", _SCANNED, better=True, pool_tokens=1_536
    ),
    "block_tokens_64": Trial({"block_tokens": 64}, "cached_ratio", _BETWEEN, better=True),
}

REFERENCE = Trial(
    {"kernel": "torch", "prefix_cache": False, **WHOLE}, CPU_RATE, Mix(requests=24), better=True
)
"""Plain torch operators one by one, nothing cached, prompts in one piece."""
