"""Fake replicas for our gateway: `python -m tools.bench.gateway.replicas --config cluster.toml`.

They speak the link's frames and tell the bus what a real replica tells it (the very publisher of
one), but compute nothing: the prompt's blocks are resident as soon as it has come.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import OrderedDict
from pathlib import Path

import uvloop
from aiohttp import WSMsgType, web

from configs.load import load_cluster
from configs.model.card import ModelCard, load_card
from configs.schema import ClusterConfig, ReplicaConfig
from events.cache import CacheFact, CacheOp
from events.load import DecodeFit, DigestShape, KVLayout, PrefillFit, ReplicaHello
from events.nats import connect
from events.output import CoreDelta, CoreFinish, LinkWelcome, StepFrame, Usage
from events.request import LINK_VERSION, MAX_LINK_FRAME_BYTES, CoreRequest, LinkHello
from events.secrets import parse_secret
from events.wire import decode_router_frame, encode
from kvstore.identity import HASH_VERSION, Namespace, chain, key_id
from replica.engine.messages import EngineLoad
from replica.publish import Publisher
from tools.bench.gateway.answer import SHORT_TOKENS, WORD

KV_BLOCKS = 1 << 16
DIGEST = DigestShape(bits=1 << 20, k=8)


def hello_of(card: ModelCard, config: ClusterConfig, replica: ReplicaConfig) -> ReplicaHello:
    """What a replica of this model says of itself."""
    return ReplicaHello(
        model=config.model.name,
        weights=card.weights_fingerprint,
        tokenizer=card.tokenizer_fingerprint,
        template=card.template_fingerprint,
        layout=KVLayout(
            dtype="bfloat16",
            layers=card.shape.layers,
            kv_heads=card.shape.kv_heads,
            head_dim=card.shape.head_dim,
            block_tokens=replica.block_tokens,
            rope="bench",
        ),
        hash_version=HASH_VERSION,
        key_id=key_id(parse_secret(config.secret)),
        digest=DIGEST,
        link_url=f"ws://{replica.host}:{replica.port}/link",
        context_tokens=card.shape.context_tokens,
        total_blocks=KV_BLOCKS,
        max_running=256,
        device="bench",
        version="bench",
    )


class Cache:
    """Resident block keys, the least recently used dropped first, tails before heads."""

    def __init__(self, cluster_key: bytes, namespace: Namespace) -> None:
        self.prompt_tokens = self.cached_tokens = 0
        self._cluster_key = cluster_key
        self._namespace = namespace
        self._block_tokens = namespace.layout.block_tokens
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._facts: list[CacheFact] = []

    def __len__(self) -> int:
        return len(self._keys)

    def admit(self, request: CoreRequest) -> int:
        """Make the prompt resident; the tokens of it that were so already."""
        keys = list(
            chain(
                self._cluster_key,
                self._namespace,
                request.salt,
                request.prompt,
                request.public_cut_blocks,
            )
        )
        hit = 0
        while hit < len(keys) and keys[hit] in self._keys:
            hit += 1
        self._facts += [CacheFact(CacheOp.STORED, key) for key in keys[hit:]]
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > KV_BLOCKS:
            self._facts.append(CacheFact(CacheOp.REMOVED, self._keys.popitem(last=False)[0]))
        prompt_tokens = len(request.prompt) // 4
        cached = min(hit * self._block_tokens, prompt_tokens - 1)
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached
        return cached

    def drain(self) -> list[CacheFact]:
        """What changed since the last call."""
        facts, self._facts = self._facts, []
        return facts


class Running:
    """A request that gets a token a tick."""

    __slots__ = ("cached", "request", "sent")

    def __init__(self, request: CoreRequest, cached: int) -> None:
        self.request, self.cached, self.sent = request, cached, 0

    def delta(self, tokens: int) -> CoreDelta:
        """The next `tokens`, and the end where it is reached."""
        self.sent += tokens
        asked = self.request
        return CoreDelta(
            asked.request_id,
            asked.attempt,
            0,
            WORD * tokens,
            (1,) * tokens,
            (),
            Usage(len(asked.prompt) // 4, self.cached, self.sent),
            CoreFinish(reason="length") if self.done else None,
        )

    @property
    def done(self) -> bool:
        return self.sent >= self.request.sampling.max_tokens


class FakeReplica:
    """Implements the two methods of an Engine that a publisher asks for, and serves the link."""

    def __init__(self, replica: ReplicaConfig, hello: ReplicaHello, config: ClusterConfig) -> None:
        self.replica = replica
        self.boot = time.time_ns() // 1_000_000
        self._cache = Cache(parse_secret(config.secret), Namespace.of_hello(hello))
        self._seen: dict[str, int] = {}
        self._new: list[Running] = []
        self._running: list[Running] = []
        self._ws: web.WebSocketResponse | None = None
        self._steps = 0
        self._work = asyncio.Event()

    def drain_facts(self) -> list[CacheFact]:
        """For the publisher."""
        return self._cache.drain()

    def load(self) -> EngineLoad:
        """For the publisher."""
        return EngineLoad(
            waiting=0,
            running=len(self._running),
            queued_prefill_tokens=0,
            running_context_tokens=0,
            free_blocks=KV_BLOCKS,
            cached_blocks=len(self._cache),
            total_blocks=KV_BLOCKS,
            step_ms=1.0,
            steps=self._steps,
            prefill=PrefillFit(0.1, 0.001, 0.0, 1.0),
            decode=DecodeFit(1.0, 0.01, 0.0, 1.0),
            seen=dict(self._seen),
            prompt_tokens_total=self._cache.prompt_tokens,
            cached_tokens_total=self._cache.cached_tokens,
            preemptions_total=0,
            last_step_s=time.monotonic(),
            alive=True,
        )

    async def link(self, request: web.Request) -> web.WebSocketResponse:
        """The one route."""
        ws = web.WebSocketResponse(max_msg_size=MAX_LINK_FRAME_BYTES, compress=False)
        await ws.prepare(request)
        async for message in ws:
            if message.type is not WSMsgType.BINARY:
                break
            frame = decode_router_frame(message.data)
            if isinstance(frame, LinkHello):
                welcome = LinkWelcome(version=LINK_VERSION, replica=self.replica.id, boot=self.boot)
                await ws.send_bytes(encode(welcome))
                self._ws = ws
            elif isinstance(frame, CoreRequest):
                self._seen[frame.router_boot] = frame.dispatch_seq
                self._new.append(Running(frame, self._cache.admit(frame)))
                self._work.set()
        return ws

    async def step_forever(self, tick_s: float) -> None:
        """What is short is answered at once, all of it in one frame; the rest once a tick."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            if not self._running:
                await self._work.wait()
            else:
                next_s = max(next_s + tick_s, loop.time())
                await asyncio.sleep(max(0.0, next_s - loop.time()))
            self._work.clear()
            deltas = self._short_answers()
            if loop.time() >= next_s:
                deltas += [each.delta(1) for each in self._running]
                self._running = [each for each in self._running if not each.done]
            if deltas and self._ws is not None:
                self._steps += 1
                await self._ws.send_bytes(encode(StepFrame(deltas=tuple(deltas))))

    def _short_answers(self) -> list[CoreDelta]:
        new, self._new = self._new, []
        deltas = []
        for each in new:
            tokens = each.request.sampling.max_tokens
            if tokens <= SHORT_TOKENS:
                deltas.append(each.delta(tokens))
            else:
                self._running.append(each)
        return deltas


async def _serve(config: ClusterConfig, tick_s: float) -> None:
    card = load_card(Path(config.model.path))
    steps = []
    bus = await connect(config.bus.url, name="bench-replicas")
    for replica in config.replicas:
        hello = hello_of(card, config, replica)
        fake = FakeReplica(replica, hello, config)
        app = web.Application()
        app.router.add_get("/link", fake.link)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, replica.host, replica.port).start()
        publisher = Publisher(bus, config.cluster, replica.id, hello, fake, replica, fake.boot)
        await publisher.start()
        steps.append(fake.step_forever(tick_s))
    print("READY", flush=True)
    await asyncio.gather(*steps)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--tick-ms", type=float, default=5.0)
    flags = parser.parse_args()
    uvloop.run(_serve(load_cluster(flags.config), flags.tick_ms / 1000))
    return 0


if __name__ == "__main__":
    sys.exit(main())
