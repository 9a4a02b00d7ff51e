"""How long one choice takes: `python -m tools.bench.decide [--seconds S]`.

Replicas with well-filled digests, chains of which a part is held by some of them. Prints the median
and the 99th percentile of RouterBrain.decide, and the index's share of it, in CPU time, so that a
busy machine doesn't count.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import numpy as np

from configs.schema import RouterConfig
from events.digest import positions
from events.load import DecodeFit, DigestShape, KVLayout, PrefillFit, ReplicaHello, ReplicaLoad
from kvstore.identity import HASH_VERSION, KeyChain
from router.choose import RouterBrain
from router.expected import Expected, pool_name
from router.fleet import Fleet
from router.route import Outcome, RouteQuery

CASES = ((2, 94), (8, 512), (64, 512))
SHAPE = DigestShape(bits=1 << 16, k=8)
FILL_BLOCKS = 3_000
CHAINS = 64
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


def _chains(rng: random.Random, blocks: int) -> list[KeyChain]:
    return [KeyChain(rng.randbytes(16 * blocks), b"") for _ in range(CHAINS)]


def _digest(rng: random.Random, chains: list[KeyChain], blocks: int) -> np.ndarray:
    """Random blocks, and a leading part of two of the chains."""
    held = [np.frombuffer(rng.randbytes(16 * FILL_BLOCKS), "<u8").reshape(-1, 2)]
    held += [chain.halves()[: rng.randrange(blocks)] for chain in rng.sample(chains, 2)]
    bits = np.zeros(SHAPE.bits, np.uint8)
    for halves in held:
        bits[positions(halves, SHAPE).ravel()] = 1
    return np.packbits(bits, bitorder="little")


def _brain(replicas: int, chains: list[KeyChain], blocks: int, rng: random.Random) -> RouterBrain:
    layout = HELLO.layout
    expected = Expected(
        model=HELLO.model,
        weights=HELLO.weights,
        tokenizer=HELLO.tokenizer,
        template=HELLO.template,
        key_id=HELLO.key_id,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
    )
    fleet = Fleet(expected, time.monotonic)
    for number in range(replicas):
        name = f"r{number}"
        fleet.on_hello(name, 1, HELLO)
        fleet.link_state(name, 1, True)
        fleet.on_load(name, 1, LOAD)
        fleet.on_digest_reset(name, 1, 1, 0, SHAPE, _digest(rng, chains, blocks))
    return RouterBrain(fleet, RouterConfig(), time.monotonic, rng)


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


def _percentiles(seconds: float, act: Callable[[int], Callable[[], None]]) -> tuple[float, float]:
    """(p50, p99) in us of `act(i)`; what it returns is done outside the measured time."""
    took, end_s, number = [], time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        start_ns = time.thread_time_ns()
        after = act(number)
        took.append(time.thread_time_ns() - start_ns)
        after()
        number += 1
    return float(np.percentile(took, 50)) / 1e3, float(np.percentile(took, 99)) / 1e3


def measure(replicas: int, blocks: int, seconds: float) -> str:
    """One line of the table."""
    rng = random.Random(1)
    chains = _chains(rng, blocks)
    brain = _brain(replicas, chains, blocks, rng)
    queries = [_query(number, chain) for number, chain in enumerate(chains)]

    def decide(number: int) -> Callable[[], None]:
        answer = brain.decide(queries[number % CHAINS])
        return lambda: brain.finish(answer.decision_id, Outcome("client_gone", False))

    def lookup(number: int) -> Callable[[], None]:
        query = queries[number % CHAINS]
        brain.fleet.index.depths(query.pool, query.chain.halves())
        return lambda: None

    decide_us, index_us = _percentiles(seconds, decide), _percentiles(seconds, lookup)
    return (
        f"{replicas:4d} x {blocks:4d}   decide {decide_us[0]:7.0f} / {decide_us[1]:7.0f} us"
        f"   index {index_us[0]:6.0f} / {index_us[1]:6.0f} us"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="time of one routing decision, p50 / p99")
    parser.add_argument("--seconds", type=float, default=2.0, help="per measurement")
    arguments = parser.parse_args()
    for replicas, blocks in CASES:
        print(measure(replicas, blocks, arguments.seconds), flush=True)


if __name__ == "__main__":
    main()
