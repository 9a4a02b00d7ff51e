"""A front on a real socket over a scripted engine, and a router's end of the link."""

from __future__ import annotations

import asyncio
import socket
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from socket import SO_RCVBUF, SO_SNDBUF

import aiohttp
import msgspec
from aiohttp import web

from events.load import KVLayout
from events.output import CacheCleared, CoreDelta, CoreFinish, LinkWelcome, StepFrame
from events.request import LINK_VERSION, CoreRequest, LinkHello, SamplingParams
from events.secrets import link_secret
from events.wire import decode_replica_frame, encode
from kvstore.identity import Namespace
from replica.engine.messages import Engine
from replica.front.app import FrontApp
from replica.front.build import Patience, build_front
from replica.front.check import Limits
from replica.front.intake import Served
from replica.front.link import LinkSettings
from replica.front.output import StepQueue
from replica.grammar.compiler import GrammarCompiler
from tests.fakes.engine import OnSubmit, ScriptedEngine, never
from tests.fakes.vocabulary import END_ID, ByteVocabulary
from tests.waiting import PATIENCE_S, until

CLUSTER_KEY = bytes(range(32))
SECRET = link_secret(CLUSTER_KEY)
LAYOUT = KVLayout(
    dtype="float32", layers=1, kv_heads=1, head_dim=8, block_tokens=4, rope="plain:10000"
)


def request(
    request_id: str = "r1", prompt: Sequence[int] = (1, 2, 3, 4, 5), attempt: int = 1, **changes
) -> CoreRequest:
    """A request with defaults; keywords of SamplingParams go there."""
    sampling = {"max_tokens": 16, "seed": 11}
    for name in SamplingParams.__struct_fields__:
        if name in changes:
            sampling[name] = changes.pop(name)
    fields = {
        "request_id": request_id,
        "attempt": attempt,
        "trace_id": "t",
        "tenant": "tenant",
        "model": "m",
        "prompt": prompt if isinstance(prompt, bytes) else array("I", prompt).tobytes(),
        "salt": b"salt",
        "sampling": SamplingParams(**sampling),
        "router_boot": "boot",
        "dispatch_seq": 3,
    }
    return CoreRequest(**(fields | changes))


@dataclass
class Answer:
    """The joined deltas of one child."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    deltas: list[CoreDelta] = field(default_factory=list)
    finish: CoreFinish | None = None

    def add(self, delta: CoreDelta) -> None:
        assert self.finish is None, "a delta after the finish"
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.deltas.append(delta)
        self.finish = delta.finish


class RouterEnd:
    """Speaks the router's half of the link and joins what comes, by request and child."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, boot: str = "boot") -> None:
        self.socket = socket
        self.boot = boot
        self.answers: dict[tuple[str, int, int], Answer] = {}
        self.frames: list[StepFrame] = []

    async def send(self, message) -> None:
        if isinstance(message, CoreRequest):
            message = msgspec.structs.replace(message, router_boot=self.boot)
        await self.socket.send_bytes(encode(message))

    async def receive(self) -> LinkWelcome | StepFrame | CacheCleared:
        async with asyncio.timeout(PATIENCE_S):
            frame = decode_replica_frame(await self.socket.receive_bytes())
        if isinstance(frame, StepFrame):
            self.frames.append(frame)
            for delta in frame.deltas:
                key = (delta.request_id, delta.attempt, delta.child)
                self.answers.setdefault(key, Answer()).add(delta)
        return frame

    async def answer(self, request_id: str = "r1", attempt: int = 1, child: int = 0) -> Answer:
        """Read until this child has finished."""
        key = (request_id, attempt, child)
        while key not in self.answers or self.answers[key].finish is None:
            await self.receive()
        return self.answers[key]

    async def closed(self) -> int | None:
        """Read until the socket is closed; its close code."""
        async with asyncio.timeout(PATIENCE_S):
            async for _ in self.socket:
                pass
        return self.socket.close_code


class Rig:
    """The front, its engine, and its address."""

    def __init__(self, app: FrontApp, engine, url: str) -> None:
        self.front = app.front
        self.app = app
        self.engine = engine
        self.url = url
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(socket_factory=lambda _: small_socket(SO_RCVBUF))
        )
        self.sockets: list[aiohttp.ClientWebSocketResponse] = []

    async def dial(self, boot: str | None = None) -> RouterEnd:
        """A link that was welcomed; of a router of its own, unless it has a `boot`."""
        end = RouterEnd(await self.connect(), boot or f"boot-{len(self.sockets)}")
        hello = LinkHello(version=LINK_VERSION, router_id="r", router_boot=end.boot, secret=SECRET)
        await end.send(hello)
        welcome = await end.receive()
        assert isinstance(welcome, LinkWelcome)
        assert (welcome.replica, welcome.boot) == ("replica-0", 5)
        return end

    async def connect(self) -> aiohttp.ClientWebSocketResponse:
        """A socket that has not introduced itself; closed with the rig."""
        socket = await self.session.ws_connect(self.url + "/link", max_msg_size=0)
        self.sockets.append(socket)
        return socket

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.text()

    async def submitted(self, count: int = 1) -> None:
        """Until the engine has this many requests."""
        await until(lambda: len(self.engine.requests) >= count)

    def empty(self) -> bool:
        """Nothing is kept of any request."""
        attempts = self.front.attempts
        return not (len(attempts) or attempts.live_children or attempts.waiting_bytes)


def small_socket(option: int) -> socket.socket:
    """A kernel buffer of few bytes, so that whoever stops reading is felt soon."""
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, option, 4096)
    return small


def served(mailbox_bytes: int, mailboxes_bytes: int, compiler: GrammarCompiler | None) -> Served:
    vocabulary = ByteVocabulary((b"own f", b"ox"))
    return Served(
        limits=Limits(model="m", vocab_size=vocabulary.vocab_size, context_tokens=128),
        vocabulary=vocabulary,
        eos_ids=frozenset((END_ID,)),
        cluster_key=CLUSTER_KEY,
        namespace=Namespace(model="m", weights="w", layout=LAYOUT),
        mailbox_bytes=mailbox_bytes,
        mailboxes_bytes=mailboxes_bytes,
        compiler=compiler,
    )


@asynccontextmanager
async def rig(
    on_submit: OnSubmit = never,
    answers_aborts: bool = True,
    engine_over: Callable[[StepQueue], Engine] | None = None,
    mailbox_bytes: int = 65_536,
    mailboxes_bytes: int = 1 << 30,
    slow_s: float = 5.0,
    stall_s: float = 5.0,
    handshake_s: float = 5.0,
    progress_s: float = 30.0,
    name: str = "replica-0",
    compiler: GrammarCompiler | None = None,
    serving: Served | None = None,
) -> AsyncIterator[Rig]:
    """A served front; whatever the test did, nothing is left of it at the end.

    `engine_over` makes another engine than the scripted one over the sink; `serving` takes the
    place of all that is served with.
    """
    queue = StepQueue(asyncio.get_running_loop())
    if engine_over is None:
        engine = ScriptedEngine(queue, on_submit, answers_aborts)
    else:
        engine = engine_over(queue)
    link = LinkSettings(name, 5, SECRET, handshake_s, heartbeat_s=30.0, stall_s=stall_s)
    serving = serving or served(mailbox_bytes, mailboxes_bytes, compiler)
    app = build_front(engine, queue, serving, link, Patience(slow_s, progress_s))
    runner = app.runner()
    await runner.setup()
    door = small_socket(SO_SNDBUF)
    door.bind(("127.0.0.1", 0))
    await web.SockSite(runner, door).start()
    host, port = runner.addresses[0][:2]
    it = Rig(app, engine, f"http://{host}:{port}")
    try:
        yield it
    finally:
        await asyncio.gather(*(socket.close() for socket in it.sockets))
        await it.session.close()
        await until(it.empty)
        await runner.cleanup()
