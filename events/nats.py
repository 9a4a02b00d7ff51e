"""The bus over core NATS. Nothing is buffered for an absent server: losses are told as gaps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as ClientSubscription
from nats.errors import Error as ClientError
from nats.errors import SlowConsumerError

from configs.schema import BusConfig
from events.bus import GapListener, Handler, Responder
from events.envelope import MAX_BUS_MESSAGE_BYTES
from events.errors import BusError, WireError
from events.kv import NatsStore
from events.tls import authority_context

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0
DIAL_WAIT_S = 0.2
"""Between attempts of the very first connection."""

MIN_RECONNECT_WAIT_S = 0.05
MAX_RECONNECT_WAIT_S = 1.0
PING_INTERVAL_S = 2
MAX_PENDING_OUT_BYTES = 1024 * 1024
"""Of what the socket has not taken yet; the client itself would block at twice this."""

MAX_PENDING_IN_MESSAGES = 65_536
MAX_PENDING_IN_BYTES = 64 * 1024 * 1024
GAP_DELAY_S = 0.05
"""A slow consumer is reported once per lost message; listeners hear of it once per this time."""

RESPONDER_TIMEOUT_S = 5.0
"""Requests on one subject are answered one by one: none may hold up the others for ever."""

YIELD_EVERY = 64
"""Messages of a backlog that are handled before other tasks get a turn."""


@dataclass(slots=True)
class BusStats:
    """Counters since the start."""

    published: int = 0
    dropped: int = 0
    received: int = 0
    slow_drops: int = 0
    reconnects: int = 0
    refused: int = 0
    handler_failures: int = 0


class NatsSubscription:
    """One subscription, remembered so that a new connection can take it over."""

    def __init__(self, subject: str, receive: Callable[[Msg], Awaitable[None]]) -> None:
        self._subject = subject
        self._receive = receive
        self._live: ClientSubscription | None = None
        self.closed = False

    async def attach(self, client: Client) -> None:
        """Subscribe on this connection."""
        self._live = await client.subscribe(
            self._subject,
            cb=self._receive,
            pending_msgs_limit=MAX_PENDING_IN_MESSAGES,
            pending_bytes_limit=MAX_PENDING_IN_BYTES,
        )

    async def close(self) -> None:
        """Stop; idempotent."""
        self.closed = True
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(ClientError):
                await live.unsubscribe()


class NatsBus:
    """One connection; made by `connect`. It comes back for ever, until closed."""

    def __init__(
        self, url: str, user: str, password: str, name: str, tls: ssl.SSLContext | None = None
    ) -> None:
        self.stats = BusStats()
        self._tls = tls
        self._url, self._user, self._password, self._name = url, user, password, name
        self._client = Client()
        self._subscriptions: list[NatsSubscription] = []
        self._gap_listeners: list[GapListener] = []
        self._gap_timer: asyncio.TimerHandle | None = None
        self._refusal: asyncio.Future[str] | None = None
        self._revival: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def connected(self) -> bool:
        """Whether the server is reachable now."""
        return bool(self._client.is_connected)

    async def open(self, timeout_s: float) -> None:
        """Dial until the deadline. Raises BusError (refused at once, unreachable at the end)."""
        self._refusal = asyncio.get_running_loop().create_future()
        dial = asyncio.create_task(self._dial(self._client))
        ends: set[asyncio.Future[Any]] = {dial, self._refusal}
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        refusal, self._refusal = self._refusal, None
        if dial.done() and dial.exception() is None:
            return
        dial.cancel()
        await asyncio.wait({dial})
        await self.close()
        why = f"no answer within {timeout_s:g} s"
        if refusal.done():
            why = refusal.result()
        elif not dial.cancelled():
            why = str(dial.exception())
        raise BusError(f"the bus at {self._url} can't be used: {why}")

    async def publish(self, subject: str, payload: bytes) -> None:
        """Hand over to the socket; drop and count while unreachable or clogged.

        Raises WireError on a payload that no reader would take.
        """
        if len(payload) > MAX_BUS_MESSAGE_BYTES:
            raise WireError(f"bus message of {len(payload)} bytes is over the limit")
        client = self._client
        clogged = client.pending_data_size + len(payload) > MAX_PENDING_OUT_BYTES
        if clogged or not client.is_connected:
            self.stats.dropped += 1
            return
        try:
            await client.publish(subject, payload)
        except ClientError:
            self.stats.dropped += 1
        else:
            self.stats.published += 1

    async def subscribe(self, subject: str, handler: Handler) -> NatsSubscription:
        """`subject` may hold "*" tokens. Returns once a server that is there has registered it."""

        async def receive(message: Msg) -> None:
            self._run_handler(handler, message)
            if self.stats.received % YIELD_EVERY == 0:
                await asyncio.sleep(0)

        return await self._add(subject, receive)

    async def serve(self, subject: str, responder: Responder) -> NatsSubscription:
        """Answer requests on `subject`, one at a time."""

        async def receive(message: Msg) -> None:
            if message.reply:
                await self._respond(responder, message)

        return await self._add(subject, receive)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """One reply. Raises TimeoutError, at once where nobody serves or no server is there."""
        if not self.connected:
            raise TimeoutError
        try:
            reply = await self._client.request(subject, payload, timeout=timeout_s)
        except ClientError:
            raise TimeoutError from None
        return bytes(reply.data)

    def store(self, bucket: str) -> NatsStore:
        """A JetStream bucket of this server."""
        return NatsStore(self, lambda: self._client, bucket)

    def on_gap(self, listener: GapListener) -> None:
        """Register for possible losses."""
        self._gap_listeners.append(listener)

    async def close(self) -> None:
        """Flush what can be flushed within a second, then leave; idempotent."""
        self._closing = True
        if self._gap_timer is not None:
            self._gap_timer.cancel()
        if self._revival is not None:
            self._revival.cancel()
            await asyncio.wait({self._revival})
        if self.connected:
            with contextlib.suppress(ClientError, TimeoutError, OSError):
                await asyncio.wait_for(self._client.flush(), 1.0)
        await self._client.close()

    async def _dial(self, client: Client) -> None:
        await client.connect(
            self._url,
            user=self._user or None,
            password=self._password or None,
            name=self._name,
            inbox_prefix=inbox_prefix(self._user),
            connect_timeout=CONNECT_TIMEOUT_S,  # type: ignore[arg-type]
            reconnect_time_wait=DIAL_WAIT_S,  # type: ignore[arg-type]
            max_reconnect_attempts=-1,
            reconnect_to_server_handler=_next_attempt,
            ping_interval=PING_INTERVAL_S,
            pending_size=2 * MAX_PENDING_OUT_BYTES,
            tls=self._tls,
            # The server's greeting would say whether it wants TLS, and anybody could say no.
            tls_handshake_first=self._tls is not None,
            error_cb=self._on_error,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
        )

    async def _add(
        self, subject: str, receive: Callable[[Msg], Awaitable[None]]
    ) -> NatsSubscription:
        subscription = NatsSubscription(subject, receive)
        self._subscriptions = [other for other in self._subscriptions if not other.closed]
        self._subscriptions.append(subscription)
        if not self._client.is_closed:
            await subscription.attach(self._client)
        if self.connected:
            with contextlib.suppress(ClientError, TimeoutError):
                # The client's ping overtakes what is not yet written: only the second one comes
                # behind the subscription.
                await self._client.flush(1)
                await self._client.flush(1)
        return subscription

    def _run_handler(self, handler: Handler, message: Msg) -> None:
        self.stats.received += 1
        try:
            handler(message.subject, message.data)
        except Exception:
            self.stats.handler_failures += 1
            log.exception("a handler failed on a message of %s", message.subject)

    async def _respond(self, responder: Responder, message: Msg) -> None:
        self.stats.received += 1
        try:
            async with asyncio.timeout(RESPONDER_TIMEOUT_S):
                reply = await responder(message.data)
        except (WireError, TimeoutError):
            self.stats.handler_failures += 1
        except Exception:
            self.stats.handler_failures += 1
            log.exception("a responder failed on a request of %s", message.subject)
        else:
            await self.publish(message.reply, reply)

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, SlowConsumerError):
            self.stats.slow_drops += 1
            self._report_gap_soon("slow_consumer")
        elif "permissions violation" in str(error).lower():
            self.stats.refused += 1
            log.warning("the bus refused a subject to %s", self._user or self._name)
        elif isinstance(error, ssl.SSLError) and self._refusal and not self._refusal.done():
            self._refusal.set_result(f"no TLS that can be trusted: {_why(error)}")
        elif "authorization" in str(error).lower() and self._refusal and not self._refusal.done():
            self._refusal.set_result("it refuses the credentials")

    async def _on_reconnected(self) -> None:
        self.stats.reconnects += 1
        self._report_gap("reconnect")

    async def _on_closed(self) -> None:
        """The client gives up for good on some errors of the server: start over without it."""
        if not self._closing and (self._revival is None or self._revival.done()):
            self._revival = asyncio.create_task(self._revive())

    async def _revive(self) -> None:
        while self._client.is_closed:
            await asyncio.sleep(MAX_RECONNECT_WAIT_S * random.uniform(0.5, 1.0))
            client = Client()
            try:
                await self._dial(client)
                for subscription in [other for other in self._subscriptions if not other.closed]:
                    await subscription.attach(client)
            except asyncio.CancelledError:
                await client.close()
                raise
            except (ClientError, OSError):
                await client.close()
                continue
            self._client = client
            await self._on_reconnected()

    def _report_gap_soon(self, reason: str) -> None:
        if self._gap_timer is None and not self._closing:
            loop = asyncio.get_running_loop()
            self._gap_timer = loop.call_later(GAP_DELAY_S, self._report_gap, reason)

    def _report_gap(self, reason: str) -> None:
        self._gap_timer = None
        for listener in self._gap_listeners:
            try:
                listener(reason)
            except Exception:
                self.stats.handler_failures += 1
                log.exception("a listener failed on word of a gap")


def _why(error: ssl.SSLError) -> str:
    """What OpenSSL says of a certificate, or of bytes that are no TLS."""
    return str(getattr(error, "verify_message", "") or error.reason or type(error).__name__)


def inbox_prefix(user: str) -> str:
    """Where replies to this user go: permissions keep everybody else from reading there."""
    return f"_INBOX.{user}" if user else "_INBOX"


def _next_attempt(servers: list[Server], _info: dict[str, object]) -> tuple[Server, float]:
    server = servers[0]
    wait_s = min(MAX_RECONNECT_WAIT_S, MIN_RECONNECT_WAIT_S * 2 ** min(server.reconnects, 8))
    return server, wait_s * random.uniform(0.5, 1.0)


async def connect(
    url: str,
    user: str = "",
    password: str = "",
    name: str = "",
    timeout_s: float = 10.0,
    tls: ssl.SSLContext | None = None,
) -> NatsBus:
    """A connected bus; with `tls` nothing is said without it. Raises BusError when refused, or not
    reachable within `timeout_s`."""
    bus = NatsBus(url, user, password, name, tls)
    await bus.open(timeout_s)
    return bus


async def join(config: BusConfig, name: str) -> NatsBus:
    """The bus of a cluster file. Raises BusError and ConfigError."""
    tls = authority_context(config.tls_ca) if config.tls_ca else None
    return await connect(config.url, config.user, config.password, name, tls=tls)
