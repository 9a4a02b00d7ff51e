"""An engine's side of KV events over real ZMQ: numbers, a replay buffer, losses on demand."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from events.kvevents import END_OF_REPLAY
from tests.waiting import PATIENCE_S

_encode = msgspec.msgpack.Encoder().encode


def stored(
    hashes: list[Any], tokens: list[int], parent: Any = None, salt: str | None = None, **more: Any
) -> dict[str, Any]:
    """As vLLM 0.32 says it."""
    extra = [[salt] if salt is not None and parent is None else None] + [None] * (len(hashes) - 1)
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": len(tokens) // len(hashes),
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": extra,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | more


def removed(*hashes: Any) -> dict[str, Any]:
    """As vLLM 0.32 says it."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0}


CLEARED = {"type": "AllBlocksCleared"}


def as_array(event: dict[str, Any]) -> list[Any]:
    """The same as vLLM 0.16 and SGLang say it."""
    names = {
        "BlockStored": "block_hashes parent_block_hash token_ids block_size lora_id medium".split(),
        "BlockRemoved": ["block_hashes", "medium"],
        "AllBlocksCleared": [],
    }[event["type"]]
    return [event["type"], *(event[name] for name in names)]


async def _bind(socket: zmq.asyncio.Socket, address: str) -> None:
    """Bind; an address that was just left may be taken for a moment, by who dials it again."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                socket.bind(address)
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
            await asyncio.sleep(0.02)


class KvPublisher:
    """Use as an async context manager. `keep` bounds the replay buffer, in messages. With `dials`
    it connects to that port for its events, instead of listening."""

    def __init__(self, keep: int = 10_000, arrays: bool = False, dials: int = 0) -> None:
        self.number = 0
        self._dials = dials
        self.replays = 0
        self.ports: tuple[int, int] | None = None
        self._keep = keep
        self._arrays = arrays
        self._sent: list[tuple[int, bytes]] = []
        self._context = zmq.asyncio.Context()
        self._live: zmq.asyncio.Socket
        self._router: zmq.asyncio.Socket
        self._serving: asyncio.Task[None]

    async def __aenter__(self) -> KvPublisher:
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()
        self._context.destroy(linger=0)

    @property
    def events(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[0]}"

    @property
    def replay(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[1]}"

    async def subscribed(self) -> None:
        """Until somebody hears what is sent from now on."""
        async with asyncio.timeout(PATIENCE_S):
            while not (await self._live.recv()).startswith(b"\x01"):
                pass

    async def send(self, *events: Any, lose: bool = False) -> None:
        """One batch; `lose`: it only reaches the replay buffer."""
        told = [as_array(event) if self._arrays else event for event in events]
        await self.send_raw(_encode([1.0, told, 0]), lose)

    async def send_raw(self, payload: bytes, lose: bool = False) -> None:
        """Any payload."""
        self._sent = [*self._sent, (self.number, payload)][-self._keep :]
        if not lose:
            await self._live.send_multipart([b"", self.number.to_bytes(8, "big"), payload])
        self.number += 1

    async def restart(self) -> None:
        """Another process at the same addresses: counts from 0, remembers nothing."""
        await self._close()
        self.number, self._sent = 0, []
        await self._open()

    async def _open(self) -> None:
        self._live = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        wanted = self.ports or ("*", "*")
        found = []
        for socket, port in zip((self._live, self._router), wanted, strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            if self._dials and socket is self._live:
                socket.connect(f"tcp://127.0.0.1:{self._dials}")
                found.append(self._dials)
                continue
            await _bind(socket, f"tcp://127.0.0.1:{port}")
            found.append(int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":")[-1]))
        self.ports = (found[0], found[1])
        self._serving = asyncio.create_task(self._serve())

    async def _close(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        for socket in (self._live, self._router):
            if not (self._dials and socket is self._live):
                socket.unbind(socket.getsockopt_string(zmq.LAST_ENDPOINT))
            socket.close(linger=0)

    async def _serve(self) -> None:
        while True:
            who, _, first = await self._router.recv_multipart()
            self.replays += 1
            for number, payload in self._sent:
                if number >= int.from_bytes(first, "big"):
                    frames = [who, b"", b"", number.to_bytes(8, "big"), payload]
                    await self._router.send_multipart(frames)
            await self._router.send_multipart([who, b"", b"", END_OF_REPLAY, b""])
