"""The link from this router to one replica: dialled, authenticated, watched, redialled.

Knows frames and sessions, not requests: those are in its table of attempts. When a
connection breaks it is dialled again, and its session goes on where it was; a session that can't go
on in time fails each sink in the table exactly once, and is never asked for again: what is
continued elsewhere is not resumed here.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from errno import ECONNREFUSED

import aiohttp

from events.errors import WireError
from events.output import CacheCleared
from events.request import (
    MAX_LINK_FRAME_BYTES,
    Abort,
    ClearCache,
    CoreRequest,
    Hold,
    Resume,
)
from events.session import RESUME_S, Ack, Incoming, Outgoing
from events.wire import encode
from router.dispatch.chutes import Chutes
from router.dispatch.introduction import LinkTarget, RouterIdentity, check_welcome
from router.dispatch.sink import AttemptSink
from router.dispatch.table import AttemptTable
from router.errors import LINK_FULL, LinkRefusedError, transport_failure

HANDSHAKE_S = 5.0
HEARTBEAT_S = 20.0
SEND_S = 20.0
BACKOFF_S = (0.05, 2.0)
MAX_OUTBOX_BYTES = 64 * 1024 * 1024
STALLED_S = 2.5
"""A replica that says nothing for so long can't be relied on."""

UP = "up"
RESUMING = "resuming"
LOST = "lost"
CONNECTION_LOST = "the connection to the replica was lost"

_LOST = (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSING)

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
        chutes: Chutes | None = None,
    ) -> None:
        self.target = target
        self._on_state = on_state
        self.state = "connecting"
        self.continues = False
        self._resumes = False
        self.counts: Counter[str] = Counter()
        self._session = session
        self._identity = identity
        self.attempts = AttemptTable(chutes)
        self._commands: dict[str, asyncio.Future[int]] = {}
        self._command_ids = itertools.count(1)
        self._session_ids = itertools.count(1)
        self._session_id = ""
        self._outgoing = Outgoing(MAX_OUTBOX_BYTES)
        self._incoming = Incoming()
        self._ack_due = False
        self._patience: asyncio.TimerHandle | None = None
        self._heard_s = 0.0
        self._work = asyncio.Event()
        self._reader: asyncio.Task[str] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._sending_since_s: float | None = None
        self._unsent_since_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._reached = False

    @property
    def up(self) -> bool:
        """Whether requests can be sent now."""
        return self.state == UP

    @property
    def in_flight(self) -> int:
        """Attempts in the table."""
        return len(self.attempts)

    @property
    def unsent_bytes(self) -> int:
        """What waits for the socket."""
        return self._outgoing.unsent_bytes

    @property
    def unsent_s(self) -> float:
        """For how long something has been waiting for it; 0 while nothing is."""
        if not self.unsent_bytes:
            return 0.0
        return asyncio.get_running_loop().time() - self._unsent_since_s

    @property
    def silent_s(self) -> float:
        """For how long the replica, if it gives signs of life, has given none."""
        signs = self.up and self._resumes
        return asyncio.get_running_loop().time() - self._heard_s if signs else 0.0

    @property
    def stalled(self) -> bool:
        """Whether it has been silent for too long."""
        return self.silent_s > STALLED_S

    def excuse(self) -> None:
        """It was this router that did not listen."""
        self._heard_s = asyncio.get_running_loop().time()

    def beat(self) -> None:
        """To be called now and then: tells the replica what has come and streams what has passed,
        and gives a socket up that has taken nothing for too long."""
        since_s, now_s = self._sending_since_s, asyncio.get_running_loop().time()
        if self._writer is not None and since_s is not None and now_s - since_s > SEND_S:
            self._writer.cancel()
        if self.up and self._resumes and self._incoming.unsaid:
            self._ack_due = True
            self._work.set()
        self.attempts.settle()

    def abandon(self, reason: str) -> None:
        """Give the replica up for now: all that it serves fails, and it is dialled anew."""
        self._down(reason)
        if self._reader is not None:
            self._reader.cancel()

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
        if len(frame) > MAX_LINK_FRAME_BYTES or self.unsent_bytes > MAX_OUTBOX_BYTES:
            self.counts["outbox_full"] += 1
            raise transport_failure("the request does not fit on the link", LINK_FULL)
        self.attempts.add(sink)
        self._post(frame)

    def control(self, frame: Abort | Hold | Resume) -> None:
        """Send, or keep for the next connection: a session's end has ended the attempt already."""
        if self.state in (UP, RESUMING):
            self._post(encode(frame))

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
        if not self._outgoing.unsent_bytes:
            self._unsent_since_s = asyncio.get_running_loop().time()
        self._outgoing.add(frame)
        self._work.set()

    async def _dial_forever(self) -> None:
        delay_s = 0.0
        while True:
            self._reached = False
            reason = await self._connect_once()
            self._ended(reason)
            self.counts[reason] += 1
            delay_s = 0.0 if self._reached else min(BACKOFF_S[1], max(BACKOFF_S[0], 2 * delay_s))
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))

    async def _connect_once(self) -> str:
        """One connection, from dialling to its end. Returns why it ended."""
        try:
            return await self._connection()
        except LinkRefusedError as error:
            return error.reason
        except WireError:
            return "malformed"
        except aiohttp.ClientOSError as error:
            return "deserted" if error.errno == ECONNREFUSED else "unreachable"
        except (aiohttp.ClientError, OSError):
            return "unreachable"

    def _ended(self, reason: str) -> None:
        """A session outlives a connection that broke, and fruitless dialling until its time is
        over. Where nobody listens any more, nobody has kept it."""
        if self.up and reason == LOST and self._resumes:
            self.state = RESUMING
            self._on_state(self.target.replica, self.target.boot, False)
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(RESUME_S, self._down, LOST)
        elif not (self.state == RESUMING and reason in (LOST, "unreachable")):
            self._down(reason)

    async def _connection(self) -> str:
        handshake_s = RESUME_S / 2 if self.state == RESUMING else HANDSHAKE_S
        async with asyncio.timeout(handshake_s):
            ws = await self._session.ws_connect(
                self.target.url,
                max_msg_size=MAX_LINK_FRAME_BYTES,
                heartbeat=HEARTBEAT_S,
                timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
            )
        try:
            async with asyncio.timeout(handshake_s):
                await self._introduce(ws)
            reason = await self._exchange(ws)
            # Requests learn of the end before the slow farewell of the socket.
            self._ended(reason)
        finally:
            await ws.close()
        return reason

    async def _introduce(self, ws: aiohttp.ClientWebSocketResponse[bool]) -> None:
        resuming = self.state == RESUMING
        if not resuming:
            self._session_id = f"{self._identity.boot}-{next(self._session_ids)}"
        received = self._incoming.received if resuming else None
        await ws.send_bytes(encode(self._identity.hello(self._session_id, received)))
        welcome = check_welcome(await ws.receive(), self.target)
        if welcome.received is None:
            if resuming:
                self._down("forgotten")
        elif self.state != RESUMING or not self._outgoing.rewind(welcome.received):
            raise LinkRefusedError("late", "the session was given up meanwhile")
        else:
            self.counts["resumed"] += 1
        self.continues, self._resumes = welcome.continues, welcome.resumes
        self._outgoing.keep(MAX_OUTBOX_BYTES if welcome.resumes else 0)
        self._rise()

    def _rise(self) -> None:
        self._be_patient_no_more()
        self.state = UP
        self._reached = True
        self.excuse()
        self.announce()

    async def _exchange(self, ws: aiohttp.ClientWebSocketResponse[bool]) -> str:
        """Read and write until one of both can't go on. Returns why."""
        reader = self._reader = asyncio.create_task(self._read(ws))
        writer = self._writer = asyncio.create_task(self._write(ws))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            return LOST if not reader.done() or reader.cancelled() else reader.result()
        except WireError:
            return "malformed"
        finally:
            self._reader = self._writer = self._sending_since_s = None
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _write(self, ws: aiohttp.ClientWebSocketResponse[bool]) -> None:
        """Until the connection breaks."""
        try:
            while True:
                self._work.clear()
                self._sending_since_s = asyncio.get_running_loop().time()
                if self._ack_due:
                    self._ack_due = False
                    await ws.send_bytes(encode(self._incoming.ack()))
                while (frame := self._outgoing.next()) is not None:
                    await ws.send_bytes(frame)
                    self._sending_since_s = asyncio.get_running_loop().time()
                self._sending_since_s = None
                await self._work.wait()
        except (OSError, aiohttp.ClientError):
            return

    async def _read(self, ws: aiohttp.ClientWebSocketResponse[bool]) -> str:
        """Why it ended: the connection was lost, or the replica said goodbye."""
        while True:
            message = await ws.receive()
            self.excuse()
            if message.type is aiohttp.WSMsgType.CLOSE:
                return "closed"
            if message.type in _LOST or isinstance(message.data, OSError | aiohttp.ClientError):
                return LOST
            if message.type is not aiohttp.WSMsgType.BINARY:
                raise WireError("no binary frame on the link")
            await self._heed(message.data)

    async def _heed(self, data: bytes) -> None:
        """Take a frame in, and count it for the session that it came on."""
        incoming, counts = self._incoming, True
        try:
            frame = await self.attempts.take(data)
            if isinstance(frame, Ack):
                counts = False
                self._outgoing.acknowledge(frame.received)
            elif isinstance(frame, CacheCleared):
                self._cleared(frame)
            elif frame is not None:
                raise WireError("a second welcome on the link")
        except WireError:
            counts = False
            raise
        finally:
            if counts and incoming.note() and self._resumes:
                self._ack_due = True
                self._work.set()

    def _cleared(self, frame: CacheCleared) -> None:
        answer = self._commands.get(frame.command_id)
        if answer is not None and not answer.done():
            answer.set_result(frame.blocks)

    def _be_patient_no_more(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _down(self, state: str) -> None:
        """The session ends here, once, and everything on it."""
        self._be_patient_no_more()
        was_up, self.state = self.up, state
        if was_up:
            self._on_state(self.target.replica, self.target.boot, False)
        self._outgoing, self._incoming = Outgoing(MAX_OUTBOX_BYTES), Incoming()
        self._ack_due = False
        self.attempts.fail(transport_failure(CONNECTION_LOST))
        for answer in self._commands.values():
            if not answer.done():
                answer.set_exception(transport_failure(CONNECTION_LOST))
        self._commands.clear()
