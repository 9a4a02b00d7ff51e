"""One WebSocket from this router to one replica: dialled, authenticated, watched, redialled.

Knows frames and sinks, not requests. A sink is in the table before its request is sent; whatever
happens to the connection, each sink in the table is failed exactly once.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from events.errors import WireError
from events.output import CacheCleared, CoreDelta, LinkWelcome, StepFrame
from events.request import (
    LINK_VERSION,
    MAX_LINK_FRAME_BYTES,
    Abort,
    ClearCache,
    CoreRequest,
    Hold,
    LinkHello,
    Resume,
)
from events.wire import decode_replica_frame, encode
from router.errors import LinkRefusedError, transport_failure
from router.sink import AttemptSink

HANDSHAKE_S = 5.0
HEARTBEAT_S = 20.0
SEND_S = 20.0
BACKOFF_S = (0.05, 2.0)
MAX_OUTBOX_BYTES = 64 * 1024 * 1024
TURN_DELTAS = 128
"""A frame's deltas between two turns of the event loop: about a millisecond of work."""


@dataclass(frozen=True, slots=True)
class LinkTarget:
    """Whom to dial: a replica's id, the boot that the feed knows, and its link's URL."""

    replica: str
    boot: int
    url: str


@dataclass(frozen=True, slots=True)
class RouterIdentity:
    """Who dials. `secret` authenticates the link and is never logged."""

    router_id: str
    boot: str
    secret: str

    def hello(self) -> LinkHello:
        """The first frame."""
        return LinkHello(
            version=LINK_VERSION,
            router_id=self.router_id,
            router_boot=self.boot,
            secret=self.secret,
        )


LinkStateListener = Callable[[str, int, bool], None]
"""(replica, boot, up): called whenever a link comes up or goes down."""


class ReplicaLink:
    """The link to one life of one replica. A new life gets a new link.

    `continues`: whether the replica can go on behind what another one has delivered."""

    def __init__(
        self,
        target: LinkTarget,
        session: aiohttp.ClientSession,
        identity: RouterIdentity,
        on_state: LinkStateListener,
    ) -> None:
        self.target = target
        self._on_state = on_state
        self.state = "connecting"
        self.continues = False
        self.counts: Counter[str] = Counter()
        self._session = session
        self._identity = identity
        self._sinks: dict[tuple[str, int], AttemptSink] = {}
        self._commands: dict[str, asyncio.Future[int]] = {}
        self._command_ids = itertools.count(1)
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._reached = False

    @property
    def up(self) -> bool:
        """Whether requests can be sent now."""
        return self.state == "up"

    @property
    def in_flight(self) -> int:
        """Attempts in the table."""
        return len(self._sinks)

    def start(self) -> None:
        """Dial until closed."""
        self._task = asyncio.create_task(self._dial_forever())

    def announce(self) -> None:
        """Tell the state again: to a fleet that had forgotten this replica meanwhile."""
        if self.up:
            self._on_state(self.target.replica, self.target.boot, True)

    async def close(self) -> None:
        """Leave; whatever is still in the table fails at once."""
        self._down("closed")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.state = "closed"

    def submit(self, request: CoreRequest, sink: AttemptSink) -> None:
        """Register the sink, then hand the request to the writer. Raises AttemptError."""
        if not self.up:
            raise transport_failure("the replica is not connected")
        frame = encode(request)
        if len(frame) > MAX_LINK_FRAME_BYTES or self._outbox_bytes > MAX_OUTBOX_BYTES:
            raise transport_failure("the request does not fit on the link")
        self._sinks[sink.key] = sink
        self._post(frame)

    def control(self, frame: Abort | Hold | Resume) -> None:
        """Send, if the link is up: a broken link has ended the attempt already."""
        if self.up:
            self._post(encode(frame))

    def forget(self, sink: AttemptSink) -> None:
        """Take the sink out of the table: what comes for it later is dropped and counted."""
        self._sinks.pop(sink.key, None)

    async def clear_cache(self, timeout_s: float, limit_blocks: int | None = None) -> int:
        """Blocks that the replica dropped; from now on it uses at most `limit_blocks`.

        Raises AttemptError or TimeoutError.
        """
        if not self.up:
            raise transport_failure("the replica is not connected")
        command_id = f"{self._identity.boot}-{next(self._command_ids)}"
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._commands[command_id] = answer
        try:
            self._post(encode(ClearCache(command_id=command_id, limit_blocks=limit_blocks)))
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            self._commands.pop(command_id, None)

    def _post(self, frame: bytes) -> None:
        self._outbox.append(frame)
        self._outbox_bytes += len(frame)
        self._work.set()

    async def _dial_forever(self) -> None:
        delay_s = BACKOFF_S[0]
        while True:
            self._reached = False
            reason = await self._connect_once()
            self._down(reason)
            self.counts[reason] += 1
            delay_s = BACKOFF_S[0] if self._reached else min(BACKOFF_S[1], 2 * delay_s)
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))

    async def _connect_once(self) -> str:
        """One connection, from dialling to its end. Returns why it ended."""
        try:
            await self._connection()
        except LinkRefusedError as error:
            return error.reason
        except WireError:
            return "malformed"
        except (aiohttp.ClientError, OSError):
            return "unreachable"
        return "lost"

    async def _connection(self) -> None:
        async with asyncio.timeout(HANDSHAKE_S):
            ws = await self._session.ws_connect(
                self.target.url,
                max_msg_size=MAX_LINK_FRAME_BYTES,
                heartbeat=HEARTBEAT_S,
                timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
            )
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await ws.send_bytes(encode(self._identity.hello()))
                self._check_welcome(await ws.receive())
            self._rise()
            writer = asyncio.create_task(self._write(ws))
            try:
                await self._read(ws)
            finally:
                # Requests learn of the loss before the slow farewell of the socket.
                self._down("lost")
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
        finally:
            await ws.close()

    def _rise(self) -> None:
        self.state = "up"
        self._reached = True
        self.announce()

    def _check_welcome(self, message: aiohttp.WSMessage) -> None:
        if message.type is not aiohttp.WSMsgType.BINARY:
            raise LinkRefusedError("refused", "the replica refused the link")
        welcome = decode_replica_frame(message.data)
        if not isinstance(welcome, LinkWelcome):
            raise LinkRefusedError("malformed", "the replica's first frame is no welcome")
        if welcome.version != LINK_VERSION:
            raise LinkRefusedError("version", "the replica speaks another version of the link")
        if welcome.replica != self.target.replica:
            raise LinkRefusedError("identity", "another replica answers at this address")
        if welcome.boot != self.target.boot:
            raise LinkRefusedError("fenced", "the replica is of another boot than the bus says")
        self.continues = welcome.continues

    async def _write(self, ws: aiohttp.ClientWebSocketResponse[bool]) -> None:
        try:
            while True:
                while self._outbox:
                    frame = self._outbox.popleft()
                    async with asyncio.timeout(SEND_S):
                        await ws.send_bytes(frame)
                    self._outbox_bytes -= len(frame)
                self._work.clear()
                await self._work.wait()
        except (OSError, aiohttp.ClientError):
            # The reader sees the closing and ends the connection for both.
            await ws.close()

    async def _read(self, ws: aiohttp.ClientWebSocketResponse[bool]) -> None:
        async for message in ws:
            if message.type is not aiohttp.WSMsgType.BINARY:
                raise WireError("a text frame on the link")
            frame = decode_replica_frame(message.data)
            if isinstance(frame, StepFrame):
                await self._spread(frame.deltas)
            else:
                self._receive(frame)

    async def _spread(self, deltas: Sequence[CoreDelta]) -> None:
        """To their sinks, in order. Each costs a write to a client's socket: the loop gets its turn
        after every few, and what was written is sent then."""
        for at in range(0, len(deltas), TURN_DELTAS):
            for delta in deltas[at : at + TURN_DELTAS]:
                sink = self._sinks.get((delta.request_id, delta.attempt))
                if sink is None or not sink.put(delta):
                    self.counts["late_deltas"] += 1
            await asyncio.sleep(0)

    def _receive(self, frame: msgspec.Struct) -> None:
        if isinstance(frame, CacheCleared):
            answer = self._commands.get(frame.command_id)
            if answer is not None and not answer.done():
                answer.set_result(frame.blocks)
        else:
            raise WireError("a second welcome on the link")

    def _down(self, state: str) -> None:
        """Everything on this connection ends here, once."""
        was_up, self.state = self.up, state
        if was_up:
            self._on_state(self.target.replica, self.target.boot, False)
        self._outbox.clear()
        self._outbox_bytes = 0
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.fail(transport_failure("the connection to the replica was lost"))
        for answer in self._commands.values():
            if not answer.done():
                answer.set_exception(transport_failure("the connection to the replica was lost"))
        self._commands.clear()
