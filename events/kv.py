"""The store over JetStream's key-value buckets.

Reads and writes are single requests, and word of changes comes over core NATS: no consumer exists
that could be lost with the server, and whoever missed a change sees it by the revision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from nats.aio.client import Client
from nats.errors import Error as ClientError
from nats.errors import NoRespondersError
from nats.js.client import JetStreamContext
from nats.js.errors import NotFoundError, ServiceUnavailableError

from events.bus import Bus, Subscription
from events.store import MAX_STORE_BYTES, MAX_VALUE_BYTES, ChangeListener, Entry, StoreError

OPERATION_S = 2.0
READS_AT_ONCE = 32
T = TypeVar("T")


def bucket_of(cluster: str) -> str:
    """The bucket of one cluster's routers."""
    return f"wr_{cluster}"


def store_subjects(bucket: str) -> list[str]:
    """What a user of the bucket publishes: its values, and the requests to make and read it."""
    api, stream = "$JS.API", f"KV_{bucket}"
    return [
        f"$KV.{bucket}.*.*",
        f"{api}.STREAM.INFO.{stream}",
        f"{api}.STREAM.CREATE.{stream}",
        f"{api}.DIRECT.GET.{stream}.>",
    ]


class NatsStore:
    """One bucket. `client` gives the connection of now."""

    def __init__(self, bus: Bus, client: Callable[[], Client], bucket: str) -> None:
        self._bus = bus
        self._client = client
        self._bucket = bucket
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."

    async def put(self, key: str, value: bytes) -> int:
        """See Store.put."""
        subject = self._prefix + key
        ack = await self._try(lambda js: js.publish(subject, value, timeout=OPERATION_S))
        return int(ack.seq)

    async def get(self, key: str) -> Entry | None:
        """See Store.get."""
        subject = self._prefix + key
        try:
            message = await self._try(
                lambda js: js.get_msg(self._stream, subject=subject, direct=True)
            )
        except _MissingError:
            return None
        return Entry(key, bytes(message.data or b""), int(message.seq or 0))

    async def load(self) -> list[Entry]:
        """See Store.load."""
        try:
            keys = await self._keys()
        except _MissingError:
            await self._try(self._create)
            keys = await self._keys()
        found: list[Entry | None] = []
        for start in range(0, len(keys), READS_AT_ONCE):
            found += await asyncio.gather(*map(self.get, keys[start : start + READS_AT_ONCE]))
        return [entry for entry in found if entry is not None]

    async def last_revision(self) -> int:
        """See Store.last_revision."""
        info = await self._try(lambda js: js.stream_info(self._stream))
        return int(info.state.last_seq)

    async def watch(self, listener: ChangeListener) -> Subscription:
        """See Store.watch."""

        def changed(subject: str, _payload: bytes) -> None:
            listener(subject.removeprefix(self._prefix))

        return await self._bus.subscribe(f"{self._prefix}*.*", changed)

    async def _keys(self) -> list[str]:
        everything = f"{self._prefix}>"
        info = await self._try(lambda js: js.stream_info(self._stream, everything))
        return [subject.removeprefix(self._prefix) for subject in info.state.subjects or ()]

    async def _create(self, js: JetStreamContext) -> None:
        await js.create_key_value(
            bucket=self._bucket,
            history=1,
            max_value_size=MAX_VALUE_BYTES,
            max_bytes=MAX_STORE_BYTES,
            direct=True,
        )

    async def _try(self, operation: Callable[[JetStreamContext], Awaitable[T]]) -> T:
        client = self._client()
        if not client.is_connected:
            raise StoreError("the bus is not connected")
        try:
            return await operation(client.jetstream(timeout=OPERATION_S))
        except NotFoundError:
            raise _MissingError("the bus has no such bucket") from None
        except (NoRespondersError, ServiceUnavailableError):
            raise StoreError("the bus has no JetStream") from None
        except (ClientError, TimeoutError, OSError) as error:
            raise StoreError(f"the bus's store fails ({type(error).__name__})") from None


class _MissingError(StoreError):
    """No such bucket, or no such key."""
