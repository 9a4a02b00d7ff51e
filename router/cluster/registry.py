"""What all routers of a cluster share and keep: settings that operators change at run time.

A change holds here at once, and on all others as soon as the bus's store has it; the last writer
wins. Without the store a change holds on this router alone until the store is back, and the alarm
`registry_offline` says so. What the store has lost is written to it again. A setting of the cluster
file counts again, from the next start on, once the file says something else than it did when the
setting was changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from typing import Protocol

import msgspec

from events.bus import Bus, Subscription
from events.errors import WireError
from events.store import MAX_VALUE_BYTES, Entry, Store, StoreError
from events.wire import decode, encode
from router.cluster.seal import Seal
from router.serving.http import log_unexpected
from router.telemetry.alarms import Alarms

START_S = 2.0
SHARE_S = 3.0
CHECK_S = 5.0
RETRY_S = 1.0
MAX_PENDING = 4_096
OFFLINE = "registry_offline"
UNREADABLE = "registry_unreadable"


class Section(Protocol):
    """One kind of setting."""

    def apply(self, name: str, value: bytes | None) -> None:
        """Make it so; None: it was removed. Raises WireError on what can't be used here."""

    def in_file(self, name: str) -> bytes | None:
        """What the cluster file says of it, if anything."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One setting as it is sealed. `file`: a digest of what the writer's cluster file said."""

    name: str
    value: bytes | None = None
    file: bytes = b""


_records = msgspec.msgpack.Decoder(Record)


class Registry:
    """The settings of all sections; `router_id` is whom the alarms name."""

    def __init__(self, bus: Bus, bucket: str, seal: Seal, alarms: Alarms, router_id: str) -> None:
        self.online = False
        self._bus = bus
        self._store: Store = bus.store(bucket)
        self._seal = seal
        self._alarms = alarms
        self._id = router_id
        self._sections: dict[str, Section] = {}
        self._entries: dict[str, Entry] = {}
        self._pending: dict[str, bytes] = {}
        self._changed: set[str] = set()
        self._closed = False
        self._loaded = False
        self._stale = True
        self._newest = 0
        self._work = asyncio.Event()
        self._turn = asyncio.Lock()
        self._watching: Subscription | None = None
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._entries.keys() | self._pending.keys())

    def add(self, kind: str, section: Section) -> None:
        """Before the start."""
        self._sections[kind] = section

    async def start(self) -> None:
        """Take over what is kept, within a bound, and follow it from then on."""
        self._watching = await self._store.watch(self._on_change)
        self._bus.on_gap(self._on_gap)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await self._round()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stop following; what the store never took is lost."""
        self._closed = True
        if self._task is not None:
            # The bus's client loses a cancellation that meets an answer: then the flag ends it.
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._watching is not None:
            await self._watching.close()

    async def share(self, kind: str, name: str, value: bytes | None) -> bool:
        """Tell all others what already holds here; whether the store has taken it."""
        key = self._seal.name(kind, name)
        record = Record(name=name, value=value, file=self._file_digest(kind, name))
        self._pending.pop(key, None)
        self._pending[key] = self._seal.close(key, encode(record))
        if len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHARE_S):
                return await self._round()
        return False

    async def _follow(self) -> None:
        while not self._closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S if self.online else RETRY_S):
                    await self._work.wait()
            self._work.clear()
            try:
                await self._round()
            except Exception as error:
                log_unexpected(error)
                await asyncio.sleep(RETRY_S)

    async def _round(self) -> bool:
        """Read what is new, write what waits; whether the store could be used."""
        async with self._turn:
            try:
                await self._read()
                await self._write()
            except StoreError as error:
                self.online, self._stale = False, True
                detail = f"{error}: changes hold on this router only"
                self._alarms.raise_(OFFLINE, self._id, detail)
                return False
            self.online = True
            self._alarms.clear(OFFLINE, self._id)
            return True

    async def _read(self) -> None:
        changed, self._changed = self._changed, set()
        if not self._stale and not changed:
            # Word of a change may get lost; the number of it can't.
            self._stale = await self._store.last_revision() != self._newest
        if self._stale:
            await self._read_all()
            return
        for key in changed:
            entry = await self._store.get(key)
            if entry is not None:
                self._take(entry)

    async def _read_all(self) -> None:
        self._stale = False
        entries = await self._store.load()
        self._newest = await self._store.last_revision()
        for entry in sorted(entries, key=lambda entry: entry.revision):
            self._take(entry)
        self._loaded = True
        lost = self._entries.keys() - {entry.key for entry in entries}
        for key in lost - self._pending.keys():
            self._pending[key] = self._entries.pop(key).value

    async def _write(self) -> None:
        for key in list(self._pending):
            value = self._pending[key]
            revision = await self._store.put(key, value)
            if self._pending.get(key) is value:
                del self._pending[key]
            self._entries[key] = Entry(key, value, revision)
            self._newest = max(self._newest, revision)

    def _take(self, entry: Entry) -> None:
        """What is newer than known here holds now, unless a change of our own is on its way."""
        self._newest = max(self._newest, entry.revision)
        known = self._entries.get(entry.key)
        if known is not None and (known.revision == entry.revision or known.value == entry.value):
            self._entries[entry.key] = entry
            return
        self._entries[entry.key] = entry
        if entry.key in self._pending:
            return
        try:
            self._apply(entry)
        except WireError as error:
            self._alarms.raise_(UNREADABLE, self._id, str(error))

    def _apply(self, entry: Entry) -> None:
        kind, _, _ = entry.key.partition(".")
        section = self._sections.get(kind)
        if section is None:
            raise WireError("a setting of a kind that is not known here")
        opened = self._seal.open(entry.key, entry.value)
        record = decode(_records, opened, MAX_VALUE_BYTES)
        if self._loaded or not self._overruled(kind, record):
            section.apply(record.name, record.value)

    def _overruled(self, kind: str, record: Record) -> bool:
        """Whether our file was changed since."""
        ours = self._file_digest(kind, record.name)
        return ours != b"" and ours != record.file

    def _file_digest(self, kind: str, name: str) -> bytes:
        said = self._sections[kind].in_file(name)
        return b"" if said is None else hashlib.blake2b(said, digest_size=16).digest()

    def _on_change(self, key: str) -> None:
        self._changed.add(key)
        self._work.set()

    def _on_gap(self, _reason: str) -> None:
        self._stale = True
        self._work.set()
