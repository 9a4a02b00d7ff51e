"""The host tier: blocks of 1 MiB into a real daemon's arena and out again, checksums on.

A put makes each block's header (checksums of all layers) and copies; a get copies and checks header
and payload. Beside them, in turns, the same bytes by memcpy.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from events.load import KVLayout
from kvstore.arena.tier import ArenaTier
from kvstore.block import BlockHeader, HeaderDraft, unsummed
from kvstore.identity import BlockIdentity, Namespace, chain, identities
from kvstore.kvd.client import open_tier
from kvstore.layout import Layout
from kvstore.tier import Handle, Outcome, Read, Status, Write
from kvstore.verify import Verifier
from replica.tiers.staging import Staging

LAYOUT = KVLayout(
    dtype="float16", layers=32, kv_heads=8, head_dim=64, block_tokens=16, rope="bench"
)
"""1 MiB a block."""
BLOCKS = 32
ARENA_BYTES = 64 << 20
ROUNDS = 25
DEADLINE_S = 30.0
_KEY = b"bench" * 4
_SALT = b"bench"


class Blocks:
    """The same blocks in every round."""

    def __init__(self) -> None:
        self.layout = Layout.of(LAYOUT)
        space = Namespace(model="bench", weights="bench", layout=LAYOUT)
        dice = np.random.default_rng(0)
        tokens = dice.integers(0, 1_000, BLOCKS * LAYOUT.block_tokens, "<u4").tobytes()
        keys = chain(_KEY, space, _SALT, tokens)
        self.identities = identities(_KEY, space, _SALT, tokens, keys)
        self.source, self.target = self._staged(), self._staged()
        for block in self.source:
            block[:] = dice.integers(0, 256, len(block), np.uint8)
        self.verifier = Verifier(_KEY, self.layout)

    def _staged(self) -> list[NDArray[np.uint8]]:
        """Memory as a replica's blocks pass through."""
        staging = Staging(BLOCKS, self.layout.payload_bytes)
        return [np.frombuffer(staging.buffer(slot), np.uint8) for slot in range(BLOCKS)]


@contextmanager
def daemon(arena_bytes: int = ARENA_BYTES) -> Iterator[Path]:
    """A kvd of its own; the path of its socket."""
    with tempfile.TemporaryDirectory(prefix="wr-bench-") as folder:
        path = Path(folder) / "kvd.sock"
        words = ("--socket", str(path), "--bytes", str(arena_bytes), "--tenant-share", "1")
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstore.kvd", *words, "--die-with-parent"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            if not process.stdout.readline().startswith("READY"):
                raise RuntimeError("kvd did not start")
            yield path
        finally:
            process.terminate()
            process.communicate(timeout=DEADLINE_S)


def copied(blocks: Blocks) -> None:
    """The floor."""
    for source, target in zip(blocks.source, blocks.target, strict=True):
        np.copyto(target, source)


def put(blocks: Blocks, tier: ArenaTier) -> None:
    """As a replica does it: the checksums are made while the blocks are copied."""
    writes = [
        Write(block.key, b"", source.data, None, _draft(blocks, block))
        for block, source in zip(blocks.identities, blocks.source, strict=True)
    ]
    _expect(tier.put(writes, time.monotonic() + DEADLINE_S), Status.STORED)


def _draft(blocks: Blocks, block: BlockIdentity) -> HeaderDraft:
    return HeaderDraft(unsummed(block, blocks.layout, writer_boot=1))


def got(blocks: Blocks, tier: ArenaTier) -> None:
    """Every block is checked against its identity and its checksums."""
    reads = [
        Read(block.key, target.data)
        for block, target in zip(blocks.identities, blocks.target, strict=True)
    ]
    outcomes = _expect(tier.get(reads, time.monotonic() + DEADLINE_S), Status.HIT)
    for outcome, block, target in zip(outcomes, blocks.identities, blocks.target, strict=True):
        if not isinstance(blocks.verifier.verdict(outcome, block, target.data), BlockHeader):
            raise RuntimeError("a block came back wrong")


def _expect(handle: Handle, status: Status) -> Sequence[Outcome]:
    outcomes = handle.result(DEADLINE_S)
    if any(outcome.status is not status for outcome in outcomes):
        raise RuntimeError(f"the arena answered {outcomes[0]}")
    return outcomes


def _seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measure() -> dict[str, float]:
    """Bandwidths of the median round, and the median of each round's ratio."""
    blocks = Blocks()
    with daemon() as path:
        tier = open_tier(path, "bench")
        rounds = [_round(blocks, tier) for _ in range(ROUNDS + 1)][1:]  # the first touches memory
        tier.close()
    size = BLOCKS * blocks.layout.payload_bytes
    memcpy, puts, gets = zip(*rounds, strict=True)
    return {
        "get_over_memcpy": statistics.median(m / g for m, g in zip(memcpy, gets, strict=True)),
        "put_over_memcpy": statistics.median(m / p for m, p in zip(memcpy, puts, strict=True)),
        "memcpy_gb_s": size / statistics.median(memcpy) / 1e9,
        "get_gb_s": size / statistics.median(gets) / 1e9,
        "put_gb_s": size / statistics.median(puts) / 1e9,
        "block_bytes": float(blocks.layout.payload_bytes),
    }


def _round(blocks: Blocks, tier: ArenaTier) -> tuple[float, float, float]:
    tier.delete([block.key for block in blocks.identities])
    return (
        _seconds(lambda: copied(blocks)),
        _seconds(lambda: put(blocks, tier)),
        _seconds(lambda: got(blocks, tier)),
    )
