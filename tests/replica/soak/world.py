"""A replica but for the bus: a real model, tiers, the engine's threads, the link's sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from configs.model.card import load_card
from configs.schema import KvConfig, ReplicaConfig
from events.load import PrefillFit
from kvstore.identity import Namespace
from kvstore.layout import Layout
from replica.engine.loop import EngineThread
from replica.front.check import Limits
from replica.front.intake import Served
from replica.front.output import StepQueue
from replica.grammar.compiler import GrammarCompiler
from replica.runner.build import build_runner, kv_layout
from replica.sched.plan import ExecutionPlan, ExecutionResult, Runner
from replica.tiers.build import assemble, host_tier
from replica.tiers.tiers import ReplicaTiers
from tests.fakes.memory_tier import MemoryTier
from tests.replica.front.rig import CLUSTER_KEY, Rig, rig

FAILS_EVERY = 307
BLOCK_TOKENS = 8
CONTEXT_TOKENS = 256


class Flaky:
    """A runner that fails now and then, never twice in a row."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.total_blocks = runner.total_blocks
        self.block_tokens = runner.block_tokens
        self.plans = self.failed = 0

    def execute(self, plan: ExecutionPlan) -> ExecutionResult:
        self.plans += 1
        if not self.plans % FAILS_EVERY:
            self.failed += 1
            raise RuntimeError("as ordered")
        return self.runner.execute(plan)

    def close(self) -> None:
        self.runner.close()


@dataclass
class World:
    """What runs. `tiers` and `flaky` only under load."""

    front: Rig
    engine: EngineThread
    tiers: ReplicaTiers | None
    flaky: Flaky | None


@asynccontextmanager
async def alone(model: Path) -> AsyncIterator[World]:
    """One request after the other, in one piece each: the reference."""
    async with _world(model, loaded=False, kv_blocks=64, max_running=1) as world:
        yield world


@asynccontextmanager
async def loaded(model: Path) -> AsyncIterator[World]:
    """Little room, small steps, loads from below, forced retractions, failing steps."""
    settings = {
        "kv_blocks": 96,
        "max_running": 8,
        "max_step_tokens": 40,
        "max_waiting_tokens": 4_000,
        "overlap": True,
        "retract_every_steps": 23,
    }
    async with _world(model, loaded=True, **settings) as world:
        yield world


@asynccontextmanager
async def _world(model: Path, loaded: bool, **settings: object) -> AsyncIterator[World]:
    card = load_card(model)
    config = ReplicaConfig(
        **{
            "id": "replica-0",
            "dtype": "float32",
            "block_tokens": BLOCK_TOKENS,
            "context_tokens": CONTEXT_TOKENS,
            **settings,
        }
    )
    layout, runner = kv_layout(card, config), build_runner(card, config)
    space = Namespace(model="m", weights="w", layout=layout)
    flaky = Flaky(runner) if loaded else None
    tiers = None
    if loaded:
        kv = KvConfig(host="inproc", host_bytes=1 << 20, check_one_in=16, staging_bytes=1 << 18)
        mover = runner.mover(Layout.of(layout))
        tiers = assemble(kv, CLUSTER_KEY, space, mover, host_tier(kv), MemoryTier(1 << 20))
    serving = Served(
        limits=Limits("m", card.shape.vocab, CONTEXT_TOKENS),
        vocabulary=card.tokenizer,
        eos_ids=card.eos_ids,
        cluster_key=CLUSTER_KEY,
        namespace=space,
        mailbox_bytes=384,
        mailboxes_bytes=64 * 1024,
        compiler=GrammarCompiler(card.tokenizer, card.eos_ids),
    )
    made: list[EngineThread] = []

    def engine_over(queue: StepQueue) -> EngineThread:
        engine = EngineThread(
            flaky or runner, queue, config, CLUSTER_KEY, check=loaded, tiers=tiers
        )
        engine.start()
        if tiers is not None:
            # A model as small as this computes faster than any load: here it pretends to be slow.
            tiers.loader.prefill = lambda: PrefillFit(a=0.0, b=10.0, c=0.0, confidence=1.0)
        made.append(engine)
        return engine

    try:
        async with rig(engine_over=engine_over, serving=serving, slow_s=1.0) as front:
            yield World(front, made[0], tiers, flaky)
    finally:
        for engine in made:
            engine.close()
