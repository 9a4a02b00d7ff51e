"""Blocks in an S3 bucket: one object per block, header and payload in one, put only if absent.

A bucket has no life time per object and nothing cheap to renew one with: what is old leaves by the
bucket's own lifecycle rule, and the end in a block's header counts. Requests of a batch run side by
side on the session's own event loop, so that one deadline and one cancel reach them all.
Credentials come from where S3 clients look for them (environment, profile, instance).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar
from urllib.parse import parse_qsl, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import S3Store

from kvstore.block import MAX_HEADER_BYTES, Whose, belongs
from kvstore.connector import ConnectorTier, Limits, Settle, whole_header
from kvstore.tier import MISS, PRESENT, STORED, WRONG_SIZE, Caps, Outcome, Read, Write, hit

MAX_VALUE_BYTES = 256 * 1024 * 1024
AT_ONCE = 8
"""Requests under way per session: bounds what they hold in memory, too."""
REQUEST_S = 30.0
CONNECT_S = 2.0
LIST_CHUNK = 256
_SUFFIX = ".kvb"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where the blocks are. `endpoint` is for servers other than AWS."""

    name: str
    prefix: str = "kv"
    endpoint: str = ""
    region: str = ""

    @classmethod
    def from_url(cls, url: str) -> Bucket:
        """`s3://bucket[/prefix][?endpoint=URL][&region=NAME]`. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme != "s3" or not parts.hostname:
            raise ValueError("an S3 store's URL is s3://bucket[/prefix][?endpoint=URL]")
        options = dict(parse_qsl(parts.query))
        return cls(
            name=parts.hostname,
            prefix=parts.path.strip("/") or "kv",
            endpoint=options.get("endpoint", ""),
            region=options.get("region", ""),
        )


def s3_tier(bucket: Bucket, limits: Limits | None = None) -> ConnectorTier:
    """Raises ValueError when the bucket is named in no way that S3 knows."""
    store = open_store(bucket)
    caps = Caps(
        name="s3",
        max_value_bytes=MAX_VALUE_BYTES,
        trusted=False,
        shared=True,
        dated=True,
    )
    return ConnectorTier(caps, lambda _: S3Session(store), limits)


class S3Session:
    """One thread's event loop; see connector.Session."""

    def __init__(self, store: S3Store) -> None:
        self._store = store
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None

    def read(self, reads: Sequence[Read], deadline: float, settle: Settle) -> None:
        """Side by side; each is copied into place once it is whole."""

        async def one(place: int) -> None:
            settle(place, await self._read(reads[place]))

        self._all(one, len(reads), deadline)

    def write(self, writes: Sequence[Write], deadline: float, settle: Settle) -> None:
        """Side by side, If-None-Match: *."""

        async def one(place: int) -> None:
            settle(place, await self._write(writes[place]))

        self._all(one, len(writes), deadline)

    def exists_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """Asks for AT_ONCE of them at a time, up to the first hole."""
        there: set[int] = set()
        for first in range(0, len(keys), AT_ONCE):
            part = keys[first : first + AT_ONCE]

            async def one(place: int, first: int = first) -> None:
                if await self._exists(keys[first + place]):
                    there.add(first + place)

            self._all(one, len(part), deadline)
            if len(there) < first + len(part):
                break
        return next((place for place in range(len(keys)) if place not in there), len(keys))

    def delete(self, keys: Sequence[bytes], deadline: float) -> None:
        """Also of those that are not there."""
        self._run(partial(self._delete, [_name(key) for key in keys]), deadline)

    def purge(self, whose: Whose, deadline: float) -> int:
        """Looks into the header of every object: rare, and exact."""
        gone: list[str] = []

        async def all_of_them() -> None:
            async for page in obstore.list(self._store, chunk_size=LIST_CHUNK):
                names = [str(item["path"]) for item in page]
                own = await _few(partial(self._theirs, whose), names)
                found = [name for name, theirs in zip(names, own, strict=True) if theirs]
                await self._delete(found)
                gone.extend(found)

        self._run(all_of_them, deadline)
        return len(gone)

    def interrupt(self) -> None:
        """Cancels what is under way."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel)

    def close(self) -> None:
        """The requests have ended before: only the loop is left."""
        if not self._loop.is_closed():
            self._loop.close()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _all(self, one: Callable[[int], Awaitable[None]], count: int, deadline: float) -> None:
        async def every() -> None:
            await _few(one, range(count))

        self._run(every, deadline)

    def _run(self, work: Callable[[], Coroutine[None, None, None]], deadline: float) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await work()

        self._task = self._loop.create_task(bounded())
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            raise InterruptedError from None
        except BaseError as error:
            raise ConnectionError(f"S3: {type(error).__name__}") from None

    async def _read(self, read: Read) -> Outcome:
        try:
            found = await obstore.get_async(self._store, _name(read.key))
            size = found.meta["size"]
            head_bytes = size - len(read.into)
            if not 0 < head_bytes <= MAX_HEADER_BYTES:
                return WRONG_SIZE
            data = memoryview(await found.bytes_async())
        except FileNotFoundError:
            return MISS
        head = bytes(data[:head_bytes])
        if len(data) != size or not whole_header(head):
            return WRONG_SIZE
        read.into[:] = data[head_bytes:]
        return hit(head)

    async def _write(self, write: Write) -> Outcome:
        parts = [bytes(write.header), bytes(write.payload)]
        try:
            await obstore.put_async(self._store, _name(write.key), parts, mode="create")
        except (AlreadyExistsError, PreconditionError):
            return PRESENT
        return STORED

    async def _exists(self, key: bytes) -> bool:
        try:
            await obstore.head_async(self._store, _name(key))
        except FileNotFoundError:
            return False
        return True

    async def _delete(self, names: Sequence[str]) -> None:
        with contextlib.suppress(FileNotFoundError):
            await obstore.delete_async(self._store, list(names))

    async def _theirs(self, whose: Whose, name: str) -> bool:
        try:
            head = await obstore.get_range_async(
                self._store, name, start=0, length=MAX_HEADER_BYTES
            )
        except FileNotFoundError:
            return False
        return belongs(bytes(head), whose)


async def _few(one: Callable[[T], Awaitable[object]], items: Sequence[T]) -> list[object]:
    """All of them, AT_ONCE at a time; the first failure ends the others."""
    gate = asyncio.Semaphore(AT_ONCE)
    results: list[object] = [None] * len(items)

    async def through(place: int) -> None:
        async with gate:
            results[place] = await one(items[place])

    try:
        async with asyncio.TaskGroup() as group:
            for place in range(len(items)):
                group.create_task(through(place))
    except* Exception as errors:
        raise errors.exceptions[0] from None
    return results


def open_store(bucket: Bucket) -> S3Store:
    """The client. Raises ValueError."""
    options = {
        name: value
        for name, value in (("endpoint", bucket.endpoint), ("region", bucket.region))
        if value
    }
    try:
        return S3Store(
            bucket.name,
            prefix=bucket.prefix,
            config=options,  # type: ignore[arg-type]
            client_options={
                "allow_http": bucket.endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=CONNECT_S),
                "timeout": timedelta(seconds=REQUEST_S),
            },
            retry_config={
                "max_retries": 1,
                "retry_timeout": timedelta(seconds=REQUEST_S),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=50),
                    "max_backoff": timedelta(seconds=1),
                    "base": 2,
                },
            },
        )
    except BaseError as error:
        raise ValueError(f"not an S3 store: {type(error).__name__}") from None


def _name(key: bytes) -> str:
    name = key.hex()
    return f"{name[:2]}/{name}{_SUFFIX}"
