"""A real engine thread with real tiers over the fake runner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from configs.schema import KvConfig
from events.load import KVLayout
from events.request import SamplingParams
from kvstore.identity import Namespace, chain
from kvstore.tier import Tier
from replica.engine.messages import EngineRequest
from replica.sched.plan import ChildId, Runner
from replica.tiers.build import assemble
from replica.tiers.mover import BlockMover
from replica.tiers.tiers import ReplicaTiers
from tests.fakes.memory_tier import MemoryTier
from tests.fakes.mover import FakeMover, fake_layout
from tests.fakes.runner import FakeRunner
from tests.replica.engine.rig import WAIT_S, EngineRig
from tests.replica.sched.rig import KEY, VOCAB

BLOCK_TOKENS = 4


def space_of(layout: KVLayout, weights: str = "w") -> Namespace:
    return Namespace(model="m", weights=weights, layout=layout)


class TieredRig(EngineRig):
    """Requests carry the real chain of their namespace and salt."""

    def __init__(
        self,
        runner: Runner,
        mover: BlockMover,
        space: Namespace,
        near: Tier | None,
        far: Tier | None = None,
        kv: KvConfig | None = None,
        **settings: object,
    ) -> None:
        self.space = space
        config = kv or KvConfig(check_one_in=0, staging_bytes=16 << 10)
        self.tiers: ReplicaTiers = assemble(config, KEY, space, mover, near, far)
        super().__init__(runner, space.layout.block_tokens, tiers=self.tiers, **settings)

    def request(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        salt: bytes = b"salt",
        cut: int = 0,
        **fields: object,
    ) -> EngineRequest:
        tokens = b"".join(token.to_bytes(4, "little") for token in prompt)
        keys = chain(KEY, self.space.adapted(fields.get("adapter")), salt, tokens, cut)
        more = {"chain": keys, "salt": salt, "public_cut_blocks": cut}
        return super().request(prompt, params, **{**more, **fields})

    def run(
        self, prompt: Sequence[int], params: SamplingParams | None = None, **fields: object
    ) -> ChildId:
        """One child, to its end."""
        child = self.submit(prompt, params, **fields)
        self.sink.end_of(child)
        return child

    def settle(self) -> None:
        """Everything computed so far is written out as far as it will be."""
        assert self.tiers.outbound.drain(WAIT_S)

    def forget(self) -> None:
        """The device loses what nobody uses; the tiers have had their time to take it."""
        self.settle()
        self.engine.clear_cache(below=False)


@contextmanager
def tiered(
    near: Tier | None = None,
    far: Tier | None = None,
    *,
    total_blocks: int = 32,
    weights: str = "w",
    kv: KvConfig | None = None,
    **settings: object,
) -> Iterator[tuple[TieredRig, FakeRunner, FakeMover]]:
    """A started engine over a fake runner; without tiers given it has a memory of its own."""
    runner = FakeRunner(total_blocks, BLOCK_TOKENS, VOCAB)
    runner.device_ms = lambda plan: 5.0 * plan.tokens
    layout = fake_layout(BLOCK_TOKENS)
    mover = FakeMover(runner, layout)
    if near is None and far is None:
        near = MemoryTier(1 << 24)
    rig = TieredRig(runner, mover, space_of(layout, weights), near, far, kv, **settings)
    rig.engine.start()
    try:
        yield rig, runner, mover
    finally:
        rig.engine.close(WAIT_S)
    assert runner.closed
    assert rig.engine.open_children() == 0
    assert rig.sink.faults == []
