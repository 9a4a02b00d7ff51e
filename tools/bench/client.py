"""One streamed chat request, timed: a client's view of any server that speaks OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

REQUEST_S = 300.0
MAX_EVENT_BYTES = 1024 * 1024
FAILURES = (
    *(aiohttp.ClientError, TimeoutError, OSError),  # of the connection
    *(ValueError, LookupError, TypeError, AttributeError, RuntimeError),  # of what came
)
FULL_LENGTH = {"temperature": 0, "ignore_eos": True}
"""As many tokens as asked for, the same each time; what an engine does not know it may refuse."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one request showed. `error` names the failure, else it is empty; times are from the
    request's start, 0 where nothing came."""

    tenant: str
    turn: int
    replica: str
    ttft_ms: float
    e2e_ms: float
    itl_ms: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    text: str
    error: str


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each server-sent event: one line, whichever line ends the server uses."""
    buffer = b""
    async for piece in response.content.iter_any():
        buffer += piece
        *lines, buffer = buffer.split(b"\n")
        if len(buffer) > MAX_EVENT_BYTES:
            raise ValueError("an event is too long")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def _refusal(response: aiohttp.ClientResponse) -> str:
    """The status, and the error's code where there is one in OpenAI's shape."""
    body = await response.content.read(MAX_EVENT_BYTES)
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, LookupError, TypeError):
        code = None
    return f"http {response.status} {code}" if code else f"http {response.status}"


class _Timer:
    """Collects the times and texts of one stream."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.at: list[float] = []
        self.text: list[str] = []
        self.usage: dict[str, Any] = {}
        self.done = False

    def take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise RuntimeError("an error in the stream")
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                self.at.append(time.perf_counter())
                self.text.append(text)

    def sample(self, tenant: str, turn: int, replica: str, error: str = "") -> Sample:
        gaps = zip(self.at, self.at[1:], strict=False)
        details = self.usage.get("prompt_tokens_details") or {}
        return Sample(
            tenant=tenant,
            turn=turn,
            replica=replica,
            ttft_ms=1e3 * (self.at[0] - self.began) if self.at else 0.0,
            e2e_ms=1e3 * (self.at[-1] - self.began) if self.at else 0.0,
            itl_ms=tuple(1e3 * (after - before) for before, after in gaps),
            prompt_tokens=self.usage.get("prompt_tokens", 0),
            cached_tokens=details.get("cached_tokens") or 0,
            completion_tokens=self.usage.get("completion_tokens", 0),
            text="".join(self.text),
            error=error,
        )


class ChatClient:
    """Streams chats to one server, as one tenant after the other. `extra` joins each body."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        model: str,
        extra: Mapping[str, Any] = FULL_LENGTH,
    ) -> None:
        self._session = session
        self._url = url
        self._model = model
        self._extra = extra

    async def chat(
        self, tenant: str, key: str, turn: int, messages: list[dict[str, str]], max_tokens: int
    ) -> Sample:
        """One turn; every failure ends in the sample's `error`."""
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        timer = _Timer()
        replica = ""
        try:
            async with asyncio.timeout(REQUEST_S):
                async with self._session.post(
                    f"{self._url}/v1/chat/completions",
                    json=body,
                    headers={"Authorization": f"Bearer {key}"} if key else {},
                ) as response:
                    replica = response.headers.get("x-warmroute-replica", "")
                    if response.status != 200:
                        return timer.sample(tenant, turn, replica, await _refusal(response))
                    async for data in _events(response):
                        timer.take(data)
        except FAILURES as error:
            return timer.sample(tenant, turn, replica, type(error).__name__)
        return timer.sample(tenant, turn, replica, "" if timer.done and timer.at else "cut short")
