"""What the bus tests share: a replica's words, a mirroring listener, an engine that is a list."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from configs.schema import ReplicaConfig
from events.cache import CacheFact, CacheOp
from events.load import (
    DecodeFit,
    DigestShape,
    KVLayout,
    PrefillFit,
    ReplicaHello,
    ReplicaLoad,
)
from replica.engine.messages import EngineLoad

CLUSTER = "local"
SHAPE = DigestShape(bits=1024, k=4)


def key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def stored(*numbers: int) -> list[CacheFact]:
    return [CacheFact(CacheOp.STORED, key(number)) for number in numbers]


def removed(*numbers: int) -> list[CacheFact]:
    return [CacheFact(CacheOp.REMOVED, key(number)) for number in numbers]


def hello(shape: DigestShape = SHAPE) -> ReplicaHello:
    return ReplicaHello(
        model="tiny",
        weights="aa",
        tokenizer="bb",
        template="cc",
        layout=KVLayout(
            dtype="float32", layers=2, kv_heads=2, head_dim=16, block_tokens=16, rope="10000"
        ),
        hash_version="wr-block-1",
        key_id="dd",
        digest=shape,
        link_url="ws://127.0.0.1:1/link",
        context_tokens=2048,
        total_blocks=128,
        max_running=8,
        device="cpu",
        version="0",
    )


def engine_load(**changes: object) -> EngineLoad:
    values: dict[str, object] = {
        "waiting": 0,
        "running": 0,
        "queued_prefill_tokens": 0,
        "running_context_tokens": 0,
        "free_blocks": 128,
        "cached_blocks": 0,
        "total_blocks": 128,
        "step_ms": 1.0,
        "steps": 0,
        "prefill": PrefillFit(1.0, 0.1, 0.0, 0.0),
        "decode": DecodeFit(1.0, 0.1, 0.0, 0.0),
        "seen": {},
        "prompt_tokens_total": 0,
        "cached_tokens_total": 0,
        "preemptions_total": 0,
        "last_step_s": 0.0,
        "alive": True,
    }
    return EngineLoad(**(values | changes))  # type: ignore[arg-type]


class ListEngine:
    """Only the side of the engine that the publisher reads."""

    def __init__(self) -> None:
        self.facts: list[CacheFact] = []
        self.now = engine_load()

    def drain_facts(self) -> list[CacheFact]:
        facts, self.facts = self.facts, []
        return facts

    def load(self) -> EngineLoad:
        return self.now


@dataclass
class Clock:
    now_s: float = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Mirror:
    """What one reader believes of one replica."""

    boot: int
    generation: int = 0
    seq: int = -1
    bits: np.ndarray | None = None
    load: ReplicaLoad | None = None
    hello: ReplicaHello | None = None

    @property
    def where(self) -> tuple[int, int, int]:
        return self.boot, self.generation, self.seq


@dataclass
class MirrorListener:
    """Rebuilds digests from the feed's calls; `broken` tells where their order can't be trusted."""

    present: dict[str, Mirror] = field(default_factory=dict)
    calls: list[tuple[str, str, int]] = field(default_factory=list)
    gone: list[tuple[str, int, str]] = field(default_factory=list)
    unknown: list[tuple[str, int, str]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    check: Callable[[str, Mirror], bool] | None = None

    def on_hello(self, replica: str, boot: int, hello: ReplicaHello) -> None:
        self.calls.append(("hello", replica, boot))
        mirror = self.present.setdefault(replica, Mirror(boot))
        mirror.hello = hello
        self._claim(mirror.boot == boot, "a new life before the end of the old one")

    def on_load(self, replica: str, boot: int, load: ReplicaLoad) -> None:
        self._of(replica, boot).load = load

    def on_digest_reset(
        self,
        replica: str,
        boot: int,
        generation: int,
        seq: int,
        shape: DigestShape,
        bits: np.ndarray,
    ) -> None:
        self.calls.append(("reset", replica, seq))
        self._claim(bits.dtype == np.uint8 and bits.shape == (shape.total_bits // 8,), "odd bits")
        mirror = self._of(replica, boot)
        mirror.generation, mirror.seq = generation, seq
        mirror.bits = np.unpackbits(bits, bitorder="little").astype(bool)
        self._checked(replica)

    def on_digest_delta(
        self,
        replica: str,
        boot: int,
        seq: int,
        set_positions: np.ndarray,
        clear_positions: np.ndarray,
    ) -> None:
        mirror = self._of(replica, boot)
        self._claim(mirror.bits is not None, "a delta on top of nothing")
        self._claim(seq == mirror.seq + 1, "a delta out of order")
        assert mirror.bits is not None
        mirror.seq = seq
        mirror.bits[set_positions] = True
        mirror.bits[clear_positions] = False
        self._checked(replica)

    def on_digest_unknown(self, replica: str, boot: int, reason: str) -> None:
        self.unknown.append((replica, boot, reason))
        self._of(replica, boot).bits = None

    def on_gone(self, replica: str, boot: int, reason: str) -> None:
        self.gone.append((replica, boot, reason))
        self._claim(self.present.pop(replica).boot == boot, "somebody else is gone")

    def resets(self) -> int:
        return sum(kind == "reset" for kind, *_ in self.calls)

    def bits(self, replica: str) -> np.ndarray | None:
        mirror = self.present.get(replica)
        return None if mirror is None else mirror.bits

    def _of(self, replica: str, boot: int) -> Mirror:
        self._claim(replica in self.present, "word of somebody who never said hello")
        self._claim(self.present[replica].boot == boot, "word of another life")
        return self.present[replica]

    def _checked(self, replica: str) -> None:
        right = self.check is None or self.check(replica, self.present[replica])
        self._claim(right, f"wrong bits at {self.present[replica].where}")

    def _claim(self, holds: bool, what: str) -> None:
        # Bus and feed survive a listener that raises: the test must hear of it all the same.
        if not holds:
            self.broken.append(what)


def config(**changes: object) -> ReplicaConfig:
    return ReplicaConfig(id="r0", **changes)  # type: ignore[arg-type]


async def settle(turns: int = 40) -> None:
    """Let everything that is ready run; nothing here waits for real time."""
    for _ in range(turns):
        await asyncio.sleep(0)
