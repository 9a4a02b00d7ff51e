"""Blocks as files: one per block, header and payload in one, under a folder that processes share.

Written aside and linked to its name, so a name always leads to a whole block that is never written
again: a read that is under way keeps its file when the block is evicted. A file's mtime is the
moment at which it dies (asking for a chain renews all of it), its atime the last use. What a crash
left half-written is swept at the start and now and then.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from kvstore.block import MAX_HEADER_BYTES, Whose, belongs, decode, header_bytes
from kvstore.connector import ConnectorTier, Limits, Settle, whole_header
from kvstore.errors import BadBlockError, StoreError
from kvstore.tier import MISS, PRESENT, STORED, WRONG_SIZE, Caps, Outcome, Read, Write, failed, hit

MAX_VALUE_BYTES = 1 << 30
DEFAULT_TTL_S = 7 * 24 * 3600.0
SWEEP_EVERY_S = 300.0
PARTIAL_S = 60.0
"""A file aside that nobody has written to for so long has no writer any more."""
_SUFFIX = ".kvb"
_ASIDE = ".part"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def file_tier(
    folder: Path,
    max_bytes: int,
    ttl_s: float = DEFAULT_TTL_S,
    limits: Limits | None = None,
    clock: Callable[[], float] = time.time,
) -> ConnectorTier:
    """At most `max_bytes`, the least recently used leave first. Raises StoreError."""
    store = FileStore(folder, max_bytes, ttl_s, clock)
    caps = Caps(
        name="file",
        max_value_bytes=min(max_bytes, MAX_VALUE_BYTES),
        trusted=False,
        shared=True,
    )
    return ConnectorTier(caps, lambda _: FileSession(store), limits, store.usage)


@dataclass(frozen=True, slots=True)
class _Found:
    """One file of the folder, as a sweep sees it."""

    key: bytes
    path: Path
    size: int
    used: float
    ends: float


class FileStore:
    """The folder; threads share it. Sizes are kept in memory, and counted anew by every sweep,
    since other processes write and evict there too."""

    def __init__(
        self, folder: Path, max_bytes: int, ttl_s: float, clock: Callable[[], float]
    ) -> None:
        """Raises StoreError when the folder can't be made."""
        self.ttl_s = ttl_s
        self.now = clock
        self._folder = folder
        self._max_bytes = max_bytes
        self._aside = itertools.count()
        # Hosts that share the folder may share a process id, stores of one process do.
        self._mine = secrets.token_hex(8)
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._used_bytes = 0
        self._lock = Lock()
        self._sweep_at = 0.0
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StoreError(f"no folder for KV blocks: {error.strerror}") from None
        self.sweep()

    def usage(self) -> tuple[int, int]:
        """Blocks and bytes."""
        return len(self._sizes), self._used_bytes

    def path(self, key: bytes) -> Path:
        """256 folders, so that none gets too long."""
        name = key.hex()
        return self._folder / name[:2] / (name + _SUFFIX)

    def aside(self, key: bytes) -> Path:
        """A name in the same folder that nobody else uses."""
        path = self.path(key)
        return path.with_name(f"{path.stem}-{self._mine}-{next(self._aside)}{_ASIDE}")

    def keep(self, key: bytes, size: int) -> None:
        """A block was stored: others make room for it."""
        with self._lock:
            self._count(key, size)
            while self._used_bytes > self._max_bytes and len(self._sizes) > 1:
                self._unlink(next(iter(self._sizes)))
        if time.monotonic() >= self._sweep_at:
            self.sweep()

    def use(self, key: bytes, path: Path, size: int, ends: float) -> None:
        """It leaves later than others; it dies at `ends`."""
        with contextlib.suppress(OSError):
            os.utime(path, (self.now(), ends))
        with self._lock:
            self._count(key, size)

    def drop(self, key: bytes) -> None:
        """Forget a block."""
        with self._lock:
            self._unlink(key)

    def lives(self, key: bytes) -> bool:
        """Whether the block is there; one whose time is over goes now."""
        try:
            if self.path(key).stat().st_mtime > self.now():
                return True
        except FileNotFoundError:
            return False
        self.drop(key)
        return False

    def sweep(self) -> None:
        """Remove what is over or was never finished, count the rest, keep to the bound."""
        self._sweep_at = time.monotonic() + SWEEP_EVERY_S
        found = sorted(self._living(), key=lambda file: file.used)
        with self._lock:
            self._sizes.clear()
            self._used_bytes = 0
            for file in found:
                self._count(file.key, file.size)
            while self._used_bytes > self._max_bytes:
                self._unlink(next(iter(self._sizes)))

    def files(self) -> Iterator[tuple[bytes, Path]]:
        """Of every file there is, as the folder says."""
        for path in self._folder.glob(f"??/*{_SUFFIX}"):
            with contextlib.suppress(ValueError):
                yield bytes.fromhex(path.stem), path

    def _living(self) -> Iterator[_Found]:
        now = self.now()
        for path in self._folder.glob(f"??/*{_ASIDE}"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < now - PARTIAL_S:
                    path.unlink()
        for key, path in self.files():
            with contextlib.suppress(OSError):
                stat = path.stat()
                if stat.st_mtime <= now or not _whole(path, stat.st_size):
                    path.unlink()
                else:
                    yield _Found(key, path, stat.st_size, stat.st_atime, stat.st_mtime)

    def _count(self, key: bytes, size: int) -> None:
        """The lock is held."""
        self._used_bytes += size - self._sizes.pop(key, 0)
        self._sizes[key] = size

    def _unlink(self, key: bytes) -> None:
        """The lock is held."""
        self._used_bytes -= self._sizes.pop(key, 0)
        with contextlib.suppress(OSError):
            self.path(key).unlink()


class FileSession:
    """One thread's use of the folder; see connector.Session."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._stopped = False

    def read(self, reads: Sequence[Read], deadline: float, settle: Settle) -> None:
        """From the page cache, mostly."""
        for place, read in enumerate(reads):
            self._check(deadline)
            settle(place, self._read(read))

    def write(self, writes: Sequence[Write], deadline: float, settle: Settle) -> None:
        """Nothing is synced to the disk: what a crash tears is found by its checksum."""
        for place, write in enumerate(writes):
            self._check(deadline)
            settle(place, self._write(write))

    def exists_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """Renews those that are there."""
        for count, key in enumerate(keys):
            self._check(deadline)
            path = self._store.path(key)
            try:
                stat = path.stat()
            except FileNotFoundError:
                return count
            if stat.st_mtime <= self._store.now():
                return count
            self._store.use(key, path, stat.st_size, self._store.now() + self._store.ttl_s)
        return len(keys)

    def delete(self, keys: Sequence[bytes], deadline: float) -> None:
        """Readers that have them open read on."""
        for key in keys:
            self._store.drop(key)

    def purge(self, whose: Whose, deadline: float) -> int:
        """Looks into the header of every file."""
        gone = 0
        for key, path in self._store.files():
            self._check(deadline)
            if _theirs(path, whose):
                self._store.drop(key)
                gone += 1
        return gone

    def interrupt(self) -> None:
        """Heard before the next block: a file has no call to be woken from."""
        self._stopped = True

    def close(self) -> None:
        """Nothing is held between calls."""

    def _check(self, deadline: float) -> None:
        if self._stopped:
            raise InterruptedError
        if time.monotonic() >= deadline:
            raise TimeoutError

    def _read(self, read: Read) -> Outcome:
        path = self._store.path(read.key)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return MISS
        try:
            stat = os.fstat(file)
            if stat.st_mtime <= self._store.now():
                self._store.drop(read.key)
                return MISS
            head_bytes = stat.st_size - len(read.into)
            if not 0 < head_bytes <= MAX_HEADER_BYTES:
                return WRONG_SIZE
            head = bytearray(head_bytes)
            if not _filled(file, [memoryview(head)]) or not whole_header(bytes(head)):
                return WRONG_SIZE
            if not _filled(file, [read.into]):
                return WRONG_SIZE
        finally:
            os.close(file)
        self._store.use(read.key, path, stat.st_size, stat.st_mtime)
        return hit(bytes(head))

    def _write(self, write: Write) -> Outcome:
        path, aside = self._store.path(write.key), self._store.aside(write.key)
        if self._store.lives(write.key):
            return PRESENT
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            ttl_s = self._store.ttl_s if write.ttl_s is None else write.ttl_s
            _write_whole(aside, [memoryview(write.header), write.payload], self._store.now(), ttl_s)
            os.link(aside, path)
        except FileExistsError:
            return PRESENT
        except OSError as error:
            return failed("full" if error.errno in _FULL else "refused")
        finally:
            aside.unlink(missing_ok=True)
        self._store.keep(write.key, len(write.header) + len(write.payload))
        return STORED


def _write_whole(path: Path, parts: list[memoryview], now: float, ttl_s: float) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        while parts:
            sent = os.writev(file, parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]
        os.utime(file, (now, now + ttl_s))
    finally:
        os.close(file)


def _filled(file: int, rooms: list[memoryview]) -> bool:
    """Whether the file had as much as there is room."""
    while rooms:
        got = os.readv(file, rooms)
        if got == 0 and any(len(room) for room in rooms):
            return False
        while rooms and got >= len(rooms[0]):
            got -= len(rooms.pop(0))
        if rooms:
            rooms[0] = rooms[0][got:]
    return True


def _whole(path: Path, size: int) -> bool:
    """Whether the file is as long as its own header says."""
    try:
        with path.open("rb") as file:
            head = file.read(MAX_HEADER_BYTES)
        header = decode(head[: header_bytes(head)])
    except (OSError, BadBlockError):
        return False
    return header_bytes(head) + header.payload_bytes == size


def _theirs(path: Path, whose: Whose) -> bool:
    try:
        with path.open("rb") as file:
            return belongs(file.read(MAX_HEADER_BYTES), whose)
    except OSError:
        return False
