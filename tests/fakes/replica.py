"""A scripted replica: a real WebSocket server that speaks the link's frames and does as it is told.

The replica tells the fleet about itself by calling a FeedListener directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections import Counter

import msgspec
import numpy as np
from aiohttp import WSMsgType, web

from configs.model.card import ModelCard
from events.feed import FeedListener
from events.grammar import GRAMMAR
from events.load import (
    BOTH,
    DecodeFit,
    DigestShape,
    FetchFit,
    KVLayout,
    PrefillFit,
    ReplicaHello,
    ReplicaLoad,
    silent_load,
)
from events.output import (
    CacheCleared,
    LinkWelcome,
)
from events.request import (
    LINK_VERSION,
    Abort,
    ClearCache,
    CoreRequest,
    Hold,
    LinkHello,
    Resume,
)
from events.session import BEAT_S, Ack
from events.wire import decode_router_frame, encode
from kvstore.identity import HASH_VERSION, key_id
from tests.fakes.scripts import BLOCK_TOKENS, Call, Script, echo

DIGEST = DigestShape(bits=65_536, k=8)
QUICK_FETCH = FetchFit(latency=1.0, per_block=0.01)
SLOW_PREFILL = PrefillFit(1.0, 1.0, 0.0, 1.0)


class FakeReplica:
    """Use as an async context manager."""

    def __init__(
        self,
        replica_id: str = "r0",
        *,
        secret: str = "link-secret",
        cluster_key: bytes = b"\1" * 32,
        boot: int = 1,
        script: Script = echo,
        model: ModelCard | None = None,
        continues: bool = True,
        max_running: int = 4_096,
        prefill: PrefillFit = SLOW_PREFILL,
        abilities: tuple[str, ...] = (GRAMMAR,),
        role: str = BOTH,
        tiers: tuple[str, ...] = (),
        peers: tuple[str, ...] = (),
        gives_signs: bool = False,
    ) -> None:
        """`gives_signs` of life on its links, as a real one does, until it falls silent."""
        self.gives_signs = gives_signs
        self.signs = 0
        self.role = role
        self.tiers = tiers
        self.peers = peers
        self.abilities = abilities
        self.max_running = max_running
        self.prefill = prefill
        self.replica_id = replica_id
        self.boot = boot
        self.script = script
        self.continues = continues
        self.calls: list[Call] = []
        self.cleared = 0
        self.hellos: list[LinkHello] = []
        self.secret = secret
        self.draining = False
        self.arrived = asyncio.Event()
        self._live: dict[tuple[str, int], Call] = {}
        self._sockets: set[web.WebSocketResponse] = set()
        self._received: Counter[web.WebSocketResponse] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None
        self._heart: asyncio.Task[None] | None = None
        self._model = model
        self._key_id = key_id(cluster_key)
        self.port = 0

    async def __aenter__(self) -> FakeReplica:
        app = web.Application()
        app.router.add_get("/link", self._link)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/link"

    @property
    def open_calls(self) -> int:
        """Scripts that still run."""
        return len(self._live)

    def hello(self) -> ReplicaHello:
        """What a real replica of this model would say."""
        card = self._model
        assert card is not None
        return ReplicaHello(
            model="tiny",
            weights=card.weights_fingerprint,
            tokenizer=card.tokenizer_fingerprint,
            template=card.template_fingerprint,
            layout=KVLayout(
                dtype="float32",
                layers=card.shape.layers,
                kv_heads=card.shape.kv_heads,
                head_dim=card.shape.head_dim,
                block_tokens=BLOCK_TOKENS,
                rope=card.shape.rope,
            ),
            hash_version=HASH_VERSION,
            key_id=self._key_id,
            digest=DIGEST,
            link_url=self.url,
            context_tokens=card.shape.context_tokens,
            total_blocks=2048,
            max_running=self.max_running,
            device="cpu",
            version="test",
            abilities=self.abilities,
            role=self.role,
            tiers=self.tiers,
            peers=self.peers,
        )

    def load(self) -> ReplicaLoad:
        return msgspec.structs.replace(
            silent_load(2048),
            digest_generation=1,
            digest_seq=0,
            step_ms=1.0,
            prefill=self.prefill,
            decode=DecodeFit(1.0, 0.1, 0.0, 1.0),
            draining=self.draining,
            engine_steps=1,
            fetch=tuple(QUICK_FETCH for _ in (*self.tiers, *self.peers)),
        )

    def announce(self, listener: FeedListener, every_s: float = 0.05) -> None:
        """Hello, an empty digest, then heartbeats until the replica dies."""
        listener.on_hello(self.replica_id, self.boot, self.hello())
        bits = np.zeros(DIGEST.bits // 8, dtype=np.uint8)
        listener.on_digest_reset(self.replica_id, self.boot, 1, 0, DIGEST, bits)
        listener.on_load(self.replica_id, self.boot, self.load())
        self._heart = asyncio.create_task(self._beat(listener, every_s))

    async def _beat(self, listener: FeedListener, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            listener.on_load(self.replica_id, self.boot, self.load())

    def break_links(self) -> None:
        """Cut every connection without a farewell."""
        for ws in list(self._sockets):
            transport = ws._req.transport if ws._req is not None else None
            if transport is not None:
                transport.abort()

    def stop_reading(self) -> None:
        """Take nothing more off the sockets, which stay open."""
        for ws in self._sockets:
            transport = ws._req.transport if ws._req is not None else None
            if transport is not None:
                transport.pause_reading()

    def fall_silent(self) -> None:
        """Say nothing more on the links, which stay open."""
        self.gives_signs = False

    def quiet(self) -> None:
        """Stop the heartbeats."""
        if self._heart is not None:
            self._heart.cancel()
            self._heart = None

    async def die(self) -> None:
        """As after kill -9: links cut, port closed."""
        self.quiet()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.break_links()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def wait_calls(self, count: int, timeout_s: float = 5.0) -> None:
        """Until `count` attempts have arrived in all."""
        async with asyncio.timeout(timeout_s):
            while len(self.calls) < count:
                self.arrived.clear()
                await self.arrived.wait()

    async def _link(self, request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(max_msg_size=0, heartbeat=30)
        await ws.prepare(request)
        self._sockets.add(ws)
        try:
            if await self._greet(ws):
                async for message in ws:
                    if message.type is WSMsgType.BINARY:
                        await self._handle(ws, message.data)
        except ConnectionError:
            pass
        finally:
            self._sockets.discard(ws)
            del self._received[ws]
            for call in [c for c in self._live.values() if c.ws is ws]:
                call.aborted.set()
        return ws

    async def _greet(self, ws: web.WebSocketResponse) -> bool:
        message = await ws.receive()
        if message.type is not WSMsgType.BINARY:
            return False
        frame = decode_router_frame(message.data)
        assert isinstance(frame, LinkHello)
        self.hellos.append(frame)
        if not hmac.compare_digest(frame.secret, self.secret):
            await ws.close(code=4403)
            return False
        welcome = LinkWelcome(
            version=LINK_VERSION,
            replica=self.replica_id,
            boot=self.boot,
            continues=self.continues,
            resumes=self.gives_signs,
        )
        await ws.send_bytes(encode(welcome))
        if self.gives_signs:
            task = asyncio.create_task(self._live_on(ws))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return True

    async def _live_on(self, ws: web.WebSocketResponse) -> None:
        with contextlib.suppress(ConnectionError):
            while self.gives_signs:
                await ws.send_bytes(encode(Ack(received=self._received[ws])))
                self.signs += 1
                await asyncio.sleep(BEAT_S)

    async def _handle(self, ws: web.WebSocketResponse, data: bytes) -> None:
        frame = decode_router_frame(data)
        self._received[ws] += not isinstance(frame, Ack)
        if isinstance(frame, CoreRequest):
            call = Call(self, ws, frame)
            self.calls.append(call)
            self._live[frame.request_id, frame.attempt] = call
            self.arrived.set()
            task = asyncio.create_task(self._run(call, self.script))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            # Not in the task itself: one that is cancelled before its first step runs nothing.
            key = frame.request_id, frame.attempt
            task.add_done_callback(lambda _: self._live.pop(key, None))
        elif isinstance(frame, ClearCache):
            self.cleared += 1
            await ws.send_bytes(encode(CacheCleared(command_id=frame.command_id, blocks=7)))
        elif isinstance(frame, Abort | Hold | Resume):
            call = self._live.get((frame.request_id, frame.attempt))
            if call is not None:
                names = {Abort: "aborted", Hold: "held", Resume: "resumed"}
                getattr(call, names[type(frame)]).set()

    async def _run(self, call: Call, script: Script) -> None:
        with contextlib.suppress(ConnectionError):
            await script(call)
