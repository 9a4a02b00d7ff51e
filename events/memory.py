"""The bus inside one process, with faults on demand: for tests, and for runs without sockets.

A hub stands for the server, a `MemoryBus` for one client's connection to it. Semantics are those
of core NATS: at most once, in order per publisher, no history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from events.bus import GapListener, Handler, Responder
from events.store import ChangeListener, Entry, StoreError

Fault = Callable[[str, bytes], Sequence[int]]
"""(subject, payload) to the copies that arrive: each number says behind how many later messages.

(0,) is faultless, () loses, (0, 0) duplicates, (2,) delivers after two more messages have passed.
"""

REPLY_SUBJECT = "_INBOX"
"""What a fault sees as the subject of a reply."""


class _Late(NamedTuple):
    behind: int
    subject: str
    payload: bytes

    def one_passed(self) -> _Late:
        return self._replace(behind=self.behind - 1)


class MemoryHub:
    """Routes between its buses."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self._subscriptions: list[MemorySubscription] = []
        self._late: list[_Late] = []
        self.buckets: dict[str, dict[str, Entry]] = {}
        self.has_store = True

    def publish(self, subject: str, payload: bytes) -> None:
        """Deliver the copies that the fault leaves, and what has waited long enough."""
        copies = self.fault(subject, payload) if self.fault else (0,)
        for _ in range(copies.count(0)):
            self._route(subject, payload)
        waiting = [late.one_passed() for late in self._late]
        self._late = [late for late in waiting if late.behind]
        self._late += [_Late(behind, subject, payload) for behind in copies if behind]
        for late in waiting:
            if not late.behind:
                self._route(late.subject, late.payload)

    def release(self) -> None:
        """Deliver now whatever a fault still holds back."""
        waiting, self._late = self._late, []
        for late in waiting:
            self._route(late.subject, late.payload)

    def lost(self, subject: str, payload: bytes) -> bool:
        """Whether the fault swallows a request or a reply."""
        return self.fault is not None and not self.fault(subject, payload)

    def responder(self, subject: str) -> Responder | None:
        """Whoever serves that subject and can be reached."""
        for found in self._subscriptions:
            if found.responder and found.matches(subject) and found.bus.connected:
                return found.responder
        return None

    def add(self, subscription: MemorySubscription) -> None:
        """Route to it from now on."""
        self._subscriptions.append(subscription)

    def remove(self, subscription: MemorySubscription) -> None:
        """Idempotent."""
        self._subscriptions = [other for other in self._subscriptions if other is not subscription]

    def remove_all(self, bus: MemoryBus) -> None:
        """Everything that this client subscribed."""
        self._subscriptions = [other for other in self._subscriptions if other.bus is not bus]

    def _route(self, subject: str, payload: bytes) -> None:
        loop = asyncio.get_running_loop()
        for found in self._subscriptions:
            if found.handler and found.matches(subject) and found.bus.connected:
                loop.call_soon(found.deliver, subject, payload)


class MemorySubscription:
    """One handler or responder behind a pattern."""

    def __init__(
        self,
        bus: MemoryBus,
        pattern: str,
        handler: Handler | None = None,
        responder: Responder | None = None,
    ) -> None:
        self.bus = bus
        self.handler = handler
        self.responder = responder
        self._pattern = pattern.split(".")
        self._closed = False

    def matches(self, subject: str) -> bool:
        """NATS rules for "*"; ">" is not used here."""
        tokens = subject.split(".")
        return len(tokens) == len(self._pattern) and all(
            want in ("*", got) for want, got in zip(self._pattern, tokens, strict=True)
        )

    def deliver(self, subject: str, payload: bytes) -> None:
        """Hand a message over, unless closed meanwhile; a failing handler harms nobody else."""
        if self.handler is None or self._closed:
            return
        try:
            self.handler(subject, payload)
        except Exception:
            self.bus.handler_failures += 1

    async def close(self) -> None:
        """Stop; idempotent."""
        self._closed = True
        self.bus.hub.remove(self)


class MemoryStore:
    """One bucket as one client sees it. A hub without `has_store` has no JetStream."""

    def __init__(self, bus: MemoryBus, bucket: str) -> None:
        self._bus = bus
        self._bucket = bucket

    async def put(self, key: str, value: bytes) -> int:
        """See Store.put."""
        entries = self._entries()
        revision = await self.last_revision() + 1
        entries[key] = Entry(key, value, revision)
        await self._bus.publish(self._subject(key), value)
        return revision

    async def get(self, key: str) -> Entry | None:
        """See Store.get."""
        return self._entries().get(key)

    async def load(self) -> list[Entry]:
        """See Store.load."""
        return list(self._entries().values())

    async def last_revision(self) -> int:
        """See Store.last_revision."""
        return max((entry.revision for entry in self._entries().values()), default=0)

    async def watch(self, listener: ChangeListener) -> MemorySubscription:
        """See Store.watch."""

        def changed(subject: str, _payload: bytes) -> None:
            listener(subject.removeprefix(self._subject("")))

        return await self._bus.subscribe(self._subject("*.*"), changed)

    def _subject(self, key: str) -> str:
        return f"$KV.{self._bucket}.{key}"

    def _entries(self) -> dict[str, Entry]:
        if not (self._bus.connected and self._bus.hub.has_store):
            raise StoreError("the bus has no store")
        return self._bus.hub.buckets.setdefault(self._bucket, {})


class MemoryBus:
    """One client. Buses that should hear each other share a hub."""

    def __init__(self, hub: MemoryHub | None = None) -> None:
        self.hub = hub or MemoryHub()
        self.published = 0
        self.dropped = 0
        self.handler_failures = 0
        self._connected = True
        self._gap_listeners: list[GapListener] = []

    @property
    def connected(self) -> bool:
        """Whether the hub is reachable now."""
        return self._connected

    async def publish(self, subject: str, payload: bytes) -> None:
        """Deliver soon; drop and count while disconnected."""
        if not self._connected:
            self.dropped += 1
            return
        self.published += 1
        self.hub.publish(subject, payload)

    async def subscribe(self, subject: str, handler: Handler) -> MemorySubscription:
        """`subject` may hold "*" tokens."""
        return self._add(MemorySubscription(self, subject, handler=handler))

    async def serve(self, subject: str, responder: Responder) -> MemorySubscription:
        """Answer requests on `subject`."""
        return self._add(MemorySubscription(self, subject, responder=responder))

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """One reply. Raises TimeoutError, at once where it is certain that none will come."""
        responder = self.hub.responder(subject) if self._connected else None
        if responder is None or self.hub.lost(subject, payload):
            raise TimeoutError
        try:
            reply = await asyncio.wait_for(responder(payload), timeout_s)
        except TimeoutError:
            raise
        except Exception:
            raise TimeoutError from None
        if not self._connected or self.hub.lost(REPLY_SUBJECT, reply):
            raise TimeoutError
        return reply

    def on_gap(self, listener: GapListener) -> None:
        """Register for possible losses."""
        self._gap_listeners.append(listener)

    def disconnect(self) -> None:
        """From now on nothing reaches this client, and nothing that it publishes gets out."""
        self._connected = False

    def reconnect(self) -> None:
        """Be reachable again; listeners hear of the gap."""
        self._connected = True
        self.report_gap("reconnect")

    def report_gap(self, reason: str) -> None:
        """Tell the listeners that something may be lost."""
        for listener in self._gap_listeners:
            try:
                listener(reason)
            except Exception:
                self.handler_failures += 1

    def store(self, bucket: str) -> MemoryStore:
        """A bucket of the hub's."""
        return MemoryStore(self, bucket)

    async def close(self) -> None:
        """Leave the hub."""
        self._connected = False
        self.hub.remove_all(self)

    def _add(self, subscription: MemorySubscription) -> MemorySubscription:
        self.hub.add(subscription)
        return subscription
