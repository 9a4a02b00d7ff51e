"""The router's choice: how long it takes, what its index costs, and how often it errs.

Replicas with digests filled to capacity, chains of which a part is held by some of them. Times are
CPU time of one thread, best of rounds, so that a busy machine doesn't count. `decision` ends when
the request can be sent; making the bus's message of it comes later: `told`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from configs.schema import RouterConfig
from events.decision import RouteDecision
from events.digest import DigestDelta, positions, split_delta
from events.garbage import settle_memory
from events.load import DecodeFit, DigestShape, KVLayout, PrefillFit, ReplicaHello, ReplicaLoad
from events.wire import decode, encode
from kvstore.identity import HASH_VERSION, KeyChain
from router.choice.choose import RouterBrain
from router.choice.route import NoReplica, Outcome, RouteQuery
from router.fleet.expected import Expected, pool_name
from router.fleet.fleet import Fleet
from tools.bench.gateway import command as gateway
from tools.flags import output_file, positive

CASES = ((64, 512), (512, 4_096))
SHAPE = DigestShape(bits=1 << 20, k=8)
FILL_BLOCKS = 1 << 16
CHAINS = 64
HOLDINGS = 2
"""Chains that each replica holds a leading part of."""

WRONG_BLOCKS = 2
COLD_CHAINS = 2_000
BATCH_BLOCKS = 256
"""Blocks stored, and as many evicted, that one delta tells of."""

_deltas: msgspec.msgpack.Decoder[DigestDelta] = msgspec.msgpack.Decoder(DigestDelta)

HELLO = ReplicaHello(
    model="bench",
    weights="w" * 16,
    tokenizer="t" * 16,
    template="c" * 16,
    layout=KVLayout(
        dtype="bfloat16", layers=1, kv_heads=1, head_dim=1, block_tokens=16, rope="none"
    ),
    hash_version=HASH_VERSION,
    key_id="k",
    digest=SHAPE,
    link_url="ws://127.0.0.1:1/link",
    context_tokens=1 << 20,
    total_blocks=1 << 16,
    max_running=64,
    device="cuda",
    version="bench",
)
LOAD = ReplicaLoad(
    digest_generation=1,
    digest_seq=0,
    waiting=2,
    running=8,
    queued_prefill_tokens=2_000,
    running_context_tokens=30_000,
    free_blocks=1_000,
    cached_blocks=60_000,
    total_blocks=1 << 16,
    step_ms=20.0,
    prefill=PrefillFit(5.0, 0.1, 1e-6, 1.0),
    decode=DecodeFit(10.0, 0.1, 1e-5, 1.0),
    seen={},
    draining=False,
    engine_steps=1,
    digest_false_positive_rate=0.001,
    prompt_tokens_total=1_000,
    cached_tokens_total=600,
    preemptions_total=0,
)


class World:
    """A brain over replicas whose digests are full, and the truth about what they hold."""

    def __init__(self, replicas: int, blocks: int, rng: random.Random) -> None:
        self.rng = rng
        self.chains = _chains(rng, blocks, CHAINS)
        self.truth: dict[tuple[str, int], int] = {}
        # Its time stands still: what is known of the replicas stays fresh.
        self.fleet = Fleet(Expected.like(HELLO), float)
        fill = np.random.default_rng(1)
        for number in range(replicas):
            self._join(f"r{number}", fill)
        self.brain = RouterBrain(self.fleet, RouterConfig(), float, rng)
        places = {name: place for place, name in enumerate(self.fleet.targets())}
        self.seats = self.fleet.index.seats(pool_name(HELLO), places)
        self.untold: list[RouteDecision | NoReplica] = []
        self.queries = [_query(number, chain) for number, chain in enumerate(self.chains)]

    def _join(self, name: str, fill: np.random.Generator) -> None:
        held = [fill.integers(0, 1 << 63, (FILL_BLOCKS, 2)).astype(np.uint64)]
        for number in self.rng.sample(range(CHAINS), HOLDINGS):
            depth = self.rng.randrange(len(self.chains[number]))
            self.truth[name, number] = depth
            held.append(self.chains[number].halves()[:depth])
        self.fleet.on_hello(name, 1, HELLO)
        self.fleet.link_state(name, 1, True)
        self.fleet.on_load(name, 1, LOAD)
        # A replica is full, not more: what its chains take, other blocks don't.
        held[0] = held[0][sum(map(len, held[1:])) :]
        self.fleet.on_digest_reset(name, 1, 1, 0, SHAPE, _digest(np.concatenate(held)))

    def decide(self, number: int) -> Callable[[], None]:
        """One choice; what it returns takes it back."""
        answer = self.brain.decide(self.queries[number % CHAINS])
        assert isinstance(answer, RouteDecision)
        return lambda: self.brain.finish(answer.decision_id, Outcome("client_gone", False))

    def tell(self, number: int) -> Callable[[], None]:
        """What a decision costs after its request is on its way."""
        encode(self.untold.pop())
        return lambda: None

    def prepare_to_tell(self, count: int) -> None:
        """Decisions of which nobody has read the terms yet."""
        self.untold = [self.brain.explain(self.queries[n % CHAINS]) for n in range(count)]

    def look_up(self, number: int) -> Callable[[], None]:
        """The index's part of it."""
        query = self.queries[number % CHAINS]
        self.seats.depths_of(query.chain.data)
        return lambda: None

    def wrong_depth_ratio(self) -> float:
        """Choices whose replica holds less than was believed by more than `WRONG_BLOCKS`."""
        cold = _chains(self.rng, len(self.chains[0]), COLD_CHAINS)
        queries = self.queries + [_query(CHAINS + n, chain) for n, chain in enumerate(cold)]
        wrong = 0
        for number, query in enumerate(queries):
            answer = self.brain.explain(query)
            assert isinstance(answer, RouteDecision)
            believed = answer.candidates[0].overlap_blocks
            wrong += believed > self.truth.get((answer.replica, number), 0) + WRONG_BLOCKS
        return wrong / len(queries)

    def ingest_changes_per_s(self, rounds: int) -> float:
        """Blocks stored or evicted that one CPU second takes in, from the message to the planes."""
        names, fill = list(self.fleet.targets()), np.random.default_rng(2)
        changed = fill.integers(0, 1 << 63, (2, BATCH_BLOCKS, 2)).astype(np.uint64)
        stored, evicted = (np.unique(positions(halves, SHAPE)) for halves in changed)
        body = encode(*split_delta(stored, np.setdiff1d(evicted, stored)))

        def ingest() -> None:
            for seq, name in enumerate(names):
                delta = decode(_deltas, body, len(body))
                self.fleet.on_digest_delta(name, 1, seq, *delta.positions(SHAPE.bits))

        best_s = min(_cpu_s(ingest) for _ in range(rounds))
        return len(names) * 2 * BATCH_BLOCKS / best_s


def _chains(rng: random.Random, blocks: int, count: int) -> list[KeyChain]:
    return [KeyChain(rng.randbytes(16 * blocks), b"") for _ in range(count)]


def _digest(halves: np.ndarray) -> np.ndarray:
    bits = np.zeros(SHAPE.bits, np.uint8)
    bits[positions(halves, SHAPE).ravel()] = 1
    return np.packbits(bits, bitorder="little")


def _query(number: int, chain: KeyChain) -> RouteQuery:
    return RouteQuery(
        request_id=f"q{number}",
        attempt=1,
        tenant="bench",
        pool=pool_name(HELLO),
        chain=chain,
        prompt_tokens=16 * len(chain) + 1,
        max_tokens=128,
        block_tokens=16,
    )


def _cpu_s(act: Callable[[], None]) -> float:
    start_ns = time.thread_time_ns()
    act()
    return 1e-9 * (time.thread_time_ns() - start_ns)


def _times_us(rounds: int, calls: int, act: Callable[[int], Callable[[], None]]) -> dict:
    """p50 and p99 of `act(i)`, of the best round; what it returns is done off the clock."""
    found = []
    for _ in range(rounds):
        took = []
        for number in range(calls):
            start_ns = time.thread_time_ns()
            after = act(number)
            took.append(1e-3 * (time.thread_time_ns() - start_ns))
            after()
        found.append([float(value) for value in np.percentile(took, (50, 99))])
    return {"p50": min(p50 for p50, _ in found), "p99": min(p99 for _, p99 in found)}


def measure(rounds: int, calls: int) -> dict[str, Any]:
    """All figures; those that depend on the fleet's size by `replicas x blocks`."""
    found: dict[str, Any] = {}
    for replicas, blocks in CASES:
        case = f"{replicas}x{blocks}"
        world = World(replicas, blocks, random.Random(1))
        settle_memory()
        world.prepare_to_tell(rounds * calls)
        acts = {"decision": world.decide, "index": world.look_up, "told": world.tell}
        for name, act in acts.items():
            for part, value in _times_us(rounds, calls, act).items():
                found.setdefault(f"{name}_{part}_us", {})[case] = value
    found["bytes_per_block"] = world.fleet.index.nbytes / (replicas * FILL_BLOCKS)
    found["wrong_depth_ratio"] = world.wrong_depth_ratio()
    found["ingest_changes_per_s"] = world.ingest_changes_per_s(rounds)
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="warmroute bench router", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--calls", type=positive, default=1_000, help="choices a round")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--gateway", action="store_true", help="measure the whole gateway too, beside its peers"
    )
    gateway.add_options(parser.add_argument_group("with --gateway"))
    flags = parser.parse_args(arguments)
    found = measure(flags.rounds, flags.calls)
    for name, value in found.items():
        print(f"{name}: {value}")
    if flags.gateway:
        found |= gateway.measure(flags)
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
