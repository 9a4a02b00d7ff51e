"""A long prefix brought back from each tier beside computing it again: time to the first token.

One engine a tier, on the default model. A first run fills the tier; then, in turns, the device's
cache is emptied and the same prompt comes back, and the prompt is computed with every cache left
out. Both must give the same tokens.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from threading import Condition

import numpy as np

from configs.model.card import ModelCard, load_card
from configs.schema import KvConfig, ReplicaConfig
from events.request import SamplingParams
from kvstore.arena.arena import Arena
from kvstore.arena.segment import Segment
from kvstore.arena.source import ArenaSource
from kvstore.arena.tier import ArenaTier
from kvstore.identity import Namespace, chain
from kvstore.kvd.client import open_tier
from kvstore.layout import Layout
from kvstore.peer.server import PeerServer
from kvstore.remote.build import build_tier
from kvstore.remote.server import EmbeddedValkey
from kvstore.tier import Tier
from replica.engine.loop import EngineThread
from replica.engine.messages import EngineRequest, StepOutput
from replica.runner.build import build_runner, kv_layout
from replica.sched.plan import ChildId
from replica.tiers.build import assemble
from replica.tiers.tiers import ReplicaTiers
from tools.bench.kv.arena import daemon
from tools.fetch import default_model

PREFIX_TOKENS = 1_500
ANSWER_TOKENS = 8
ROUNDS = 3
STORE_BYTES = 96 << 20
DEADLINE_S = 300.0
_KEY = b"bench" * 7
_SALT = b"bench"

Tiers = tuple[Tier | None, Tier | None, tuple[Tier, ...]]
"""The host's, the remote one, the peers."""


class FirstTokens:
    """A sink that remembers when each child's first token came, and all tokens."""

    def __init__(self) -> None:
        self._first_s: dict[int, float] = {}
        self._tokens: dict[int, list[int]] = {}
        self._ended: set[int] = set()
        self._changed = Condition()

    def __call__(self, step: StepOutput) -> None:
        """See StepSink."""
        with self._changed:
            for output in step.children:
                self._tokens.setdefault(output.child, []).extend(output.token_ids)
                if output.token_ids:
                    self._first_s.setdefault(output.child, time.monotonic())
                if output.finish is not None:
                    self._ended.add(output.child)
            self._changed.notify_all()

    def wait(self, child: int) -> tuple[float, list[int]]:
        """When its first token came, and its tokens, once it has ended. Raises RuntimeError."""
        with self._changed:
            if not self._changed.wait_for(lambda: child in self._ended, DEADLINE_S):
                raise RuntimeError("the engine did not answer")
            return self._first_s[child], self._tokens[child]


class Bench:
    """One engine with its tiers, and the one prompt."""

    def __init__(self, card: ModelCard, tiers: Tiers) -> None:
        config = ReplicaConfig(id="bench", kv_blocks=256, context_tokens=2_048, threads=2)
        layout, runner = kv_layout(card, config), build_runner(card, config)
        self._space = Namespace(model="bench", weights="bench", layout=layout)
        kv = KvConfig(check_one_in=0, load_deadline_ms=60_000.0, lookup_ms=1_000.0)
        mover = runner.mover(Layout.of(layout))
        near, far, peers = tiers
        self._sink = FirstTokens()
        self.tiers: ReplicaTiers = assemble(kv, _KEY, self._space, mover, near, far, peers)
        self.engine = EngineThread(runner, self._sink, config, _KEY, tiers=self.tiers)
        self._children = 0
        self._prompt = np.random.default_rng(1).integers(100, 40_000, PREFIX_TOKENS + 1, "<u4")

    def run(self, compute: bool) -> tuple[float, list[int]]:
        """Seconds to the first token, and the tokens; with `compute` no cache is read."""
        self._children += 1
        started_s = time.monotonic()
        request = EngineRequest(
            child=ChildId(self._children),
            prompt=tuple(self._prompt.tolist()),
            chain=chain(_KEY, self._space, _SALT, self._prompt.tobytes()),
            params=SamplingParams(max_tokens=ANSWER_TOKENS, seed=0, temperature=0.0),
            seed=0,
            eos_ids=frozenset(),
            tenant="bench",
            arrival_s=started_s,
            skip_cache_read=compute,
            salt=_SALT,
        )
        self.engine.submit(request)
        first_s, tokens = self._sink.wait(self._children)
        return first_s - started_s, tokens

    def empty(self) -> None:
        """Everything is written out, then the device holds nothing."""
        if not self.tiers.outbound.drain(DEADLINE_S):
            raise RuntimeError("the blocks were not written in time")
        self.engine.clear_cache(below=False)


def fill(bench: Bench, uses: int) -> None:
    """Leave the prompt's blocks in the bench's tiers; a remote one takes them at the second use."""
    bench.engine.start()
    for _ in range(uses):
        bench.run(compute=False)
    bench.empty()


def gain(bench: Bench) -> float:
    """How many times sooner the first token comes. Raises RuntimeError when nothing is restored, or
    other tokens come."""
    ratios = []
    for _ in range(ROUNDS):
        computed_s, wanted = bench.run(compute=True)
        bench.empty()
        loaded = bench.tiers.loader.loaded_blocks
        restored_s, tokens = bench.run(compute=False)
        if bench.tiers.loader.loaded_blocks == loaded or tokens != wanted:
            raise RuntimeError("the prefix was not restored as it was")
        bench.empty()
        ratios.append(computed_s / restored_s)
    return statistics.median(ratios)


@contextmanager
def arena(card: ModelCard) -> Iterator[Bench]:
    """The host's kvd."""
    with daemon(STORE_BYTES) as path:
        yield from _filled(Bench(card, (open_tier(path, "bench"), None, ())), uses=1)


@contextmanager
def peer(card: ModelCard) -> Iterator[Bench]:
    """Another host's store, over loopback; a replica there has written the blocks."""
    store = Arena(Segment.private(STORE_BYTES))
    writer = Bench(card, (ArenaTier.local(store), None, ()))
    fill(writer, uses=1)
    writer.engine.close()
    server = PeerServer(ArenaSource(store, "bench"), _KEY)
    server.start()
    try:
        tier = build_tier(server.url, secret=_KEY)
        yield from _filled(Bench(card, (None, None, (tier,))), uses=0)
    finally:
        server.close()


@contextmanager
def remote(card: ModelCard) -> Iterator[Bench]:
    """An embedded Valkey."""
    with tempfile.TemporaryDirectory(prefix="wr-bench-") as folder, ExitStack() as undo:
        valkey = EmbeddedValkey(Path(folder), 2 * STORE_BYTES)
        valkey.start()
        undo.callback(valkey.stop)
        far = build_tier(valkey.url, secret=_KEY, ttl_s=600.0)
        yield from _filled(Bench(card, (None, far, ())), uses=2)


def _filled(bench: Bench, uses: int) -> Iterator[Bench]:
    fill(bench, uses)
    try:
        yield bench
    finally:
        bench.engine.close()


STORES: dict[str, Callable[[ModelCard], AbstractContextManager[Bench]]] = {
    "arena": arena,
    "peer": peer,
    "remote": remote,
}


def measure() -> dict[str, float]:
    """`restore_gain.{arena,peer,remote}`: times sooner."""
    card = load_card(default_model())
    found = {}
    for name, store in STORES.items():
        with store(card) as bench:
            found[f"restore_gain.{name}"] = gain(bench)
    return found
