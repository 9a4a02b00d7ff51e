"""A router's brain with replicas that exist only as messages: what the feed would tell, told."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from configs.schema import RouterConfig
from events.decision import RouteDecision
from events.digest import positions
from events.load import (
    DecodeFit,
    DigestShape,
    KVLayout,
    PrefillFit,
    ReplicaHello,
    ReplicaLoad,
    silent_load,
)
from kvstore.identity import HASH_VERSION, KeyChain, Namespace, chain
from router.choice.choose import RouterBrain
from router.choice.route import Outcome, RouteQuery
from router.fleet.expected import Expected, pool_name
from router.fleet.fleet import Fleet
from router.locality.optimistic import OptimisticEntries
from router.tenancy.gate import Gate
from router.tenancy.limits import Account

KEY = bytes(range(32))
BLOCK_TOKENS = 16
SHAPE = DigestShape(bits=1 << 16, k=8)
LAYOUT = KVLayout(
    dtype="float32", layers=2, kv_heads=2, head_dim=16, block_tokens=BLOCK_TOKENS, rope="t10000"
)


class Clock:
    """Monotonic seconds that move when told."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


def hello(**changes: object) -> ReplicaHello:
    base = ReplicaHello(
        model="tiny",
        weights="aa" * 16,
        tokenizer="bb" * 16,
        template="cc" * 16,
        layout=LAYOUT,
        hash_version=HASH_VERSION,
        key_id="0011",
        digest=SHAPE,
        link_url="ws://127.0.0.1:9/link",
        context_tokens=16_384,
        total_blocks=4_096,
        max_running=32,
        device="cpu",
        version="0",
    )
    return msgspec.structs.replace(base, **changes)


def load(**changes: object) -> ReplicaLoad:
    base = msgspec.structs.replace(
        silent_load(4_096),
        digest_generation=1,
        digest_seq=0,
        step_ms=10.0,
        prefill=PrefillFit(5.0, 1.0, 0.0, 1.0),
        decode=DecodeFit(50.0, 3.0, 0.0, 1.0),
        engine_steps=1,
    )
    return msgspec.structs.replace(base, **changes)


EXPECTED = dataclasses.replace(Expected.like(hello()), block_tokens=frozenset({BLOCK_TOKENS}))
POOL = pool_name(hello())


def prompt(*parts: tuple[int, int]) -> KeyChain:
    """A chain over parts of (seed, blocks): equal leading parts are equal prefixes."""
    tokens = [
        np.random.default_rng(seed).integers(0, 1_000, blocks * BLOCK_TOKENS).astype("<u4")
        for seed, blocks in parts
    ]
    namespace = Namespace.of_hello(hello())
    return chain(KEY, namespace, b"salt", np.concatenate(tokens).tobytes())


def digest_bits(*chains: KeyChain, shape: DigestShape = SHAPE) -> np.ndarray:
    """The whole digest of a replica that holds these chains."""
    bits = np.zeros(shape.bits, np.uint8)
    for held in chains:
        bits[positions(held.halves(), shape).ravel()] = 1
    return np.packbits(bits, bitorder="little")


def promised(entries: OptimisticEntries, chain: KeyChain) -> dict[str, int]:
    """Leading blocks of the chain by replica, of those that are promised some."""
    rows = {name: row for row, name in enumerate(name for name in entries.slots if name)}
    depths = np.zeros(len(rows), np.int32)
    entries.seats(rows).count_in(chain, depths)
    return {name: depth for name, depth in zip(rows, depths.tolist(), strict=True) if depth}


class World:
    """Fleet and brain, and shorthand for what happens to them."""

    def __init__(
        self,
        replicas: int = 0,
        policy: str = "warmroute",
        seed: int = 1,
        clock: Clock | None = None,
        router_boot: str | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self.fleet = Fleet(EXPECTED, self.clock)
        self.told: list[RouteDecision] = []
        self.brain = RouterBrain(
            self.fleet,
            RouterConfig(policy=policy),
            self.clock,
            random.Random(seed),
            on_decision=self.told.append,
            router_boot=router_boot,
        )
        self.asked = 0
        for number in range(replicas):
            self.join(f"r{number}")

    def join(self, replica: str, boot: int = 1, held: tuple[KeyChain, ...] = ()) -> None:
        """A replica that is well, linked, and holds these chains."""
        self.fleet.on_hello(replica, boot, hello())
        self.fleet.link_state(replica, boot, True)
        self.fleet.on_load(replica, boot, load())
        self.hold(replica, *held, boot=boot)

    def hold(self, replica: str, *chains: KeyChain, boot: int = 1) -> None:
        """Its digest says that it holds exactly these chains."""
        self.fleet.on_digest_reset(replica, boot, 1, 0, SHAPE, digest_bits(*chains))

    def keep_busy(self, *replicas: str, boot: int = 1) -> None:
        """For a minute prefills take 0.9 of their time, at 1 ms a token."""
        for second in range(1, 61):
            self.clock.pass_s(1.0)
            for replica in replicas:
                self.fleet.on_load(replica, boot, load(prompt_tokens_total=900 * second))

    def query(self, keys: KeyChain, **changes: object) -> RouteQuery:
        self.asked += 1
        values: dict[str, object] = {
            "request_id": f"q{self.asked}",
            "attempt": 1,
            "tenant": "t",
            "pool": POOL,
            "chain": keys,
            "prompt_tokens": len(keys) * BLOCK_TOKENS + 1,
            "max_tokens": 64,
            "block_tokens": BLOCK_TOKENS,
        }
        return RouteQuery(**{**values, **changes})

    def decide(self, keys: KeyChain, **changes: object) -> RouteDecision:
        answer = self.brain.decide(self.query(keys, **changes))
        assert isinstance(answer, RouteDecision), answer
        return answer

    def serve(self, decision: RouteDecision, cached_tokens: int = 0) -> None:
        """First token and a clean end."""
        self.brain.first_token(
            decision.decision_id, cached_tokens, decision.prompt_tokens, decision.predicted_ttft_ms
        )
        self.end(decision, "ok", cached_tokens=cached_tokens)

    def end(
        self,
        decision: RouteDecision,
        status: str,
        replica_fault: bool = False,
        cached_tokens: int = 0,
    ) -> None:
        self.brain.finish(
            decision.decision_id,
            Outcome(
                status,
                replica_fault,
                cached_tokens=cached_tokens,
                prompt_tokens=decision.prompt_tokens,
                completion_tokens=10,
            ),
        )


@contextmanager
def inside(counted: Account | Gate) -> Iterator[None]:
    """One request's stay."""
    visitor = object()
    if isinstance(counted, Account):
        counted.enter()
    else:
        counted.enter(visitor)
    try:
        yield
    finally:
        counted.leave() if isinstance(counted, Account) else counted.leave(visitor)
