"""A program for LMCache's own Python environment: our words on one side, its server on the other.

    python -I sidecar.py --control-fd N --server tcp://127.0.0.1:5555

LMCache wants other versions of packages than we do, so its client runs here, alone. Its parent
sends one end of a socket pair for each session over the control socket: there is no address that
anybody else could come to. It says READY there once it can work, and ends when that is closed. Only
the standard library and lmcache are imported; our side imports the words from here.

A request is a head (op u8, 3 zeros, count u32) and its items; every item of a READ or WRITE has an
answer of its own, in order, an ASK has one. All little endian:

    READ item: key 16 | most value bytes u32        answer: status u8, 3 zeros, size u32 | value
    WRITE item: key 16 | size u32 | value           answer: status u8, 3 zeros, 0 u32
    ASK item: key 16                                answer: OK, 3 zeros, how many are there u32
    DELETE item: key 16                             answer: status u8, 3 zeros, 0 u32

In LMCache a value is a sequence of chunks: SLOT_BYTES of memory each, whose "tokens" spell the key
and the chunk's number. Its hashes are a chain over tokens, so that no two keys share a chunk. A
length comes before the value. Memory is shared with the server: nothing is pickled.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

READY = b"r"
OP_READ, OP_WRITE, OP_ASK, OP_DELETE = 1, 2, 3, 4
OK, MISS, PRESENT, FULL, FAILED, WRONG_SIZE = 0, 1, 2, 3, 4, 5
HEAD = struct.Struct("<B3xI")
READ_ITEM = struct.Struct("<16sI")
WRITE_ITEM = struct.Struct("<16sI")
KEY_BYTES = 16
MAX_ITEMS = 4_096
MAX_VALUE_BYTES = 64 << 20

SLOT_BYTES = 64 << 10
MODEL = f"warmroute-{SLOT_BYTES}"
SALT = "warmroute-1"
SERVER_S = 5.0
"""After so long without an answer the server counts as gone."""
_LENGTH = struct.Struct("<Q")
_KEY_WORDS = struct.Struct("<8H")
_LEAST_CHUNK_TOKENS = 16


class ServerGoneError(Exception):
    """LMCache does not answer, or does not know us any more."""


def tokens_of(key: bytes, chunks: int, chunk_tokens: int) -> tuple[int, ...]:
    """The tokens that stand for a key in LMCache."""
    tokens: list[int] = []
    for number in range(chunks):
        words = (number, *_KEY_WORDS.unpack(key))
        tokens += (*words, *[0] * (chunk_tokens - len(words)))
    return tuple(tokens)


def chunks_of(value_bytes: int) -> int:
    """How many chunks hold a value with its length."""
    return -(-(_LENGTH.size + value_bytes) // SLOT_BYTES)


class Server:
    """One registration at an LMCache server; made anew once it fails. One thread uses it."""

    def __init__(self, url: str, http_port: int) -> None:
        """Raises ServerGoneError."""
        import zmq
        from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextPayload
        from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self._http_port = http_port
        self._zmq = zmq.Context()
        self._zmq.setsockopt(zmq.LINGER, 0)
        self._client = RequestClientFactory.create(url, context=self._zmq)
        self._instance = uuid.uuid4().int >> 65
        self._shared: Any = None
        try:
            self._chunk_tokens = int(self._client.get_chunk_size().result(timeout=SERVER_S))
            if self._chunk_tokens < _LEAST_CHUNK_TOKENS:
                raise ServerGoneError("its chunks are too short")
            payload = RegisterEngineDrivenContextPayload(
                instance_id=self._instance,
                model_name=MODEL,
                world_size=1,
                block_size=self._chunk_tokens,
                num_layers=1,
                hidden_dim_size=-(-SLOT_BYTES // self._chunk_tokens),
                dtype_str="uint8",
                use_mla=True,
                num_physical_slots=self._chunk_tokens,
            )
            told = self._client.register_kv_cache_engine_driven_context(payload)
            said = told.result(timeout=SERVER_S)
            if not said.shm_name:
                raise ServerGoneError("it shares no memory: start it with --shm-name")
            self._shared = EngineDrivenContextShm(
                None, self._client, SERVER_S, said.shm_name, said.pool_size
            )
        except BaseException as error:
            self.close()
            if isinstance(error, ServerGoneError):
                raise
            raise ServerGoneError(f"{type(error).__name__}") from error

    def close(self) -> None:
        """Idempotent."""
        with suppress(Exception):
            if self._shared is not None:
                self._shared.close()
        with suppress(Exception):
            self._client.close()
        with suppress(Exception):
            self._zmq.term()

    def write(self, key: bytes, value: memoryview) -> int:
        """A status."""
        ipc = self._key(key, chunks_of(len(value)))
        try:
            prepared = self._shared.prepare_store(ipc, self._instance)
            if prepared is None:
                raise ServerGoneError("it shares no memory")
            slots, places = prepared
            if not slots:
                return PRESENT if self._found(ipc) == chunks_of(len(value)) else FULL
            for slot, place in zip(slots, places, strict=True):
                _fill(_bytes_of(slot), value, place)
            right = self._shared.commit_store(ipc, self._instance, [])
            return OK if right else FAILED
        finally:
            self._end(ipc)

    def read(self, key: bytes, most: int) -> tuple[list[memoryview], int, Any] | None:
        """What is there of a value of at most so many bytes, in shared memory that stays as it is
        until `release`; and how long the value is."""
        whole = self._key(key, chunks_of(most))
        found = self._hold(whole)
        ipc = self._key(key, found, whole.request_id) if found else whole
        slots = self._shared.prepare_retrieve(ipc, self._instance) if found else None
        if not slots:
            self._end(ipc)
            return None
        views = [_bytes_of(slot) for slot in slots]
        (size,) = _LENGTH.unpack_from(views[0])
        return list(_parts(views, size)), int(size), ipc

    def release(self, ipc: Any) -> None:
        """The value may leave."""
        self._shared.commit_retrieve(ipc, self._instance)
        self._end(ipc)

    def exists_prefix(self, keys: Sequence[bytes]) -> int:
        """How many keys from the first one on are there, by their first chunks."""
        for count, key in enumerate(keys):
            if not self._found(self._key(key, 1)):
                return count
        return len(keys)

    def delete(self, key: bytes) -> int:
        """A status; only where the server's HTTP port is known."""
        held = self.read(key, 0) if self._http_port else None
        if held is None:
            return MISS if self._http_port else FAILED
        _, size, ipc = held
        self.release(ipc)
        from lmcache.v1.distributed.api import ipc_key_to_object_keys
        from lmcache.v1.multiprocess.token_hasher import TokenHasher

        whole = self._key(key, chunks_of(size))
        hashes = TokenHasher(self._chunk_tokens).compute_chunk_hashes(list(whole.token_ids))
        objects = ipc_key_to_object_keys(whole, hashes, [0])[0]
        keys = [asdict(each.to_encoded_object_key()) for each in objects]
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._http_port}/cache/objects",
            json.dumps({"keys": keys, "tier": "l1"}).encode(),
            {"Content-Type": "application/json"},
            method="DELETE",
        )
        with urllib.request.urlopen(request, timeout=SERVER_S) as answer:
            return OK if answer.status == 200 else FAILED

    def _found(self, ipc: Any) -> int:
        """How many chunks are there; nothing is held afterwards."""
        found = self._hold(ipc)
        if found:
            self._client.free_lookup_locks(self._narrowed(ipc, found), 1).result(timeout=SERVER_S)
        self._end(ipc)
        return found

    def _hold(self, ipc: Any) -> int:
        """How many chunks are there, from the first one on; they are held."""
        self._client.lookup(ipc.no_worker_id_version(), 1).result(timeout=SERVER_S)
        until = time.monotonic() + SERVER_S
        while time.monotonic() < until:
            waited = self._client.wait_prefetch_status(ipc.request_id, SERVER_S)
            found = waited.result(timeout=2 * SERVER_S)
            if found is not None:
                return int(found)
        raise ServerGoneError("a lookup that does not end")

    def _end(self, ipc: Any) -> None:
        self._client.end_session(ipc.request_id).result(timeout=SERVER_S)

    def _narrowed(self, ipc: Any, chunks: int) -> Any:
        tokens = ipc.token_ids[: chunks * self._chunk_tokens]
        return self._made(tokens, ipc.request_id).no_worker_id_version()

    def _key(self, key: bytes, chunks: int, request_id: str = "") -> Any:
        return self._made(tokens_of(key, chunks, self._chunk_tokens), request_id)

    def _made(self, tokens: tuple[int, ...], request_id: str) -> Any:
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        return IPCCacheServerKey(
            model_name=MODEL,
            world_size=1,
            worker_id=0,
            token_ids=tokens,
            start=0,
            end=len(tokens),
            request_id=request_id or uuid.uuid4().hex,
            cache_salt=SALT,
            num_kv_readers=1,
        )


def _bytes_of(slot: Any) -> memoryview:
    return memoryview(slot.view(-1).numpy()).cast("B")


def _fill(slot: memoryview, value: memoryview, place: int) -> None:
    """The part of length and value that belongs to the chunk `place`."""
    start = place * SLOT_BYTES - _LENGTH.size
    if place == 0:
        slot[: _LENGTH.size] = _LENGTH.pack(len(value))
        part = value[: SLOT_BYTES - _LENGTH.size]
        slot[_LENGTH.size : _LENGTH.size + len(part)] = part
    else:
        part = value[start : start + SLOT_BYTES]
        slot[: len(part)] = part


def _parts(views: Sequence[memoryview], size: int) -> Iterator[memoryview]:
    for place, view in enumerate(views):
        begin = _LENGTH.size if place == 0 else 0
        part = view[begin : min(SLOT_BYTES, begin + size)]
        size -= len(part)
        if len(part):
            yield part


class User(threading.Thread):
    """One connection of ours, with a registration of its own at the server."""

    def __init__(self, connected: socket.socket, url: str, http_port: int) -> None:
        super().__init__(daemon=True)
        self._connected = connected
        self._url = url
        self._http_port = http_port

    def run(self) -> None:
        """Until the user hangs up or the server is gone: then it hangs up."""
        server: Server | None = None
        try:
            server = Server(self._url, self._http_port)
            while True:
                self._answer(server)
        except (OSError, ServerGoneError, EOFError):
            pass
        except Exception as error:
            print(f"lmcache: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            self._connected.close()
            if server is not None:
                server.close()

    def _answer(self, server: Server) -> None:
        op, count = HEAD.unpack(self._take(HEAD.size))
        if not 0 < count <= MAX_ITEMS:
            raise EOFError
        if op == OP_READ:
            items = self._take(READ_ITEM.size * count)
            for key, most in READ_ITEM.iter_unpack(items):
                self._read(server, key, min(most, MAX_VALUE_BYTES))
        elif op == OP_WRITE:
            for _ in range(count):
                key, size = WRITE_ITEM.unpack(self._take(WRITE_ITEM.size))
                if size > MAX_VALUE_BYTES:
                    raise EOFError
                self._say(server.write(key, memoryview(self._take(size))))
        elif op == OP_ASK:
            data = self._take(KEY_BYTES * count)
            keys = [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]
            self._say(OK, server.exists_prefix([bytes(key) for key in keys]))
        elif op == OP_DELETE:
            for _ in range(count):
                self._say(server.delete(bytes(self._take(KEY_BYTES))))
        else:
            raise EOFError

    def _read(self, server: Server, key: bytes, most: int) -> None:
        found = server.read(key, most)
        if found is None:
            self._say(MISS)
            return
        parts, size, held = found
        try:
            if size > most:
                self._say(WRONG_SIZE)
            elif sum(map(len, parts)) < size:
                self._say(MISS)  # its tail was evicted
            else:
                self._say(OK, size)
                for part in parts:
                    self._connected.sendall(part)
        finally:
            server.release(held)

    def _say(self, status: int, size: int = 0) -> None:
        self._connected.sendall(HEAD.pack(status, size))

    def _take(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            got = self._connected.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]
        return data


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--http-port", type=int, default=0)
    flags = parser.parse_args()
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    import lmcache.v1.multiprocess.transfer_context.shm  # noqa: F401  (seconds, once)

    control = socket.socket(fileno=flags.control_fd)
    control.sendall(READY)
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        for descriptor in descriptors:
            User(socket.socket(fileno=descriptor), flags.server, flags.http_port).start()
        if not data:
            os._exit(0)  # users' threads wait for a server at most


if __name__ == "__main__":
    main()
