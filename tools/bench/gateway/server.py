"""Fake OpenAI servers on several ports, for the peers: `python -m tools.bench.gateway.server`.

Knows as much of HTTP as the peers' clients say. Renders and tokenises for nobody (404), which is
what is quickest for vllm-router: it would ask every worker.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys

import uvloop

from tools.bench.gateway.answer import SHORT_TOKENS, WORD
from tools.bench.gateway.prompts import MODEL

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MAX_TOKENS = re.compile(rb'"max(?:_completion)?_tokens": ?(\d+)')
_STREAM = re.compile(rb'"stream": ?true')
_ID = b'"id":"chatcmpl-1","created":1,"model":"bench"'
_BODY = (
    b"{%b" % _ID + b',"object":"chat.completion","choices":[{"index":0,"message":{"role":'
    b'"assistant","content":"%b"},"finish_reason":"length"}],"usage":{"prompt_tokens":512,'
    b'"completion_tokens":1,"total_tokens":513}}' % WORD.encode()
)
_CHUNK = (
    b"data: {%b" % _ID + b',"object":"chat.completion.chunk","choices":[{"index":0,"delta":'
    b'{"content":"%b"},"finish_reason":null}]}\n\n' % WORD.encode()
)
_MODELS = b'{"object":"list","data":[{"id":"%b","object":"model"}]}' % MODEL.encode()
_INFO = b'{"model_path":"%b","tokenizer_path":"","is_generation":true}' % MODEL.encode()
_EVENT_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _plain(status: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


_ANSWER = _plain(b"200 OK", _BODY)
_EVENT = _chunked(_CHUNK)
_END = _chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_GET = {b"/v1/models": _MODELS, b"/get_model_info": _INFO, b"/model_info": _INFO}


class Worker(asyncio.Protocol):
    """One connection of a gateway."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._data = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._data, 0, end + 2)
            size = end + 4 + (int(length[1]) if length else 0)
            if len(self._data) < size:
                return
            request, self._data = self._data[:size], self._data[size:]
            self._answer(request, end)

    def _answer(self, request: bytes, end: int) -> None:
        verb, path, _ = request.split(b" ", 2)
        if verb == b"GET":
            self._transport.write(_plain(b"200 OK", _GET.get(path, b"{}")))
        elif path not in (b"/v1/chat/completions", b"/v1/completions"):
            self._transport.write(_plain(b"404 Not Found", b"{}"))
        elif _STREAM.search(request, end):
            wanted = _MAX_TOKENS.search(request, end)
            self._begin(int(wanted[1]) if wanted else 1)
        else:
            self._transport.write(_ANSWER)

    def _begin(self, tokens: int) -> None:
        if tokens <= SHORT_TOKENS:
            self._transport.write(_EVENT_STREAM + _EVENT * tokens + _END)
        else:
            self._transport.write(_EVENT_STREAM)
            self._go_on(tokens)

    def _go_on(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if not left:
            self._transport.write(_END)
            return
        self._transport.write(_EVENT)
        asyncio.get_running_loop().call_later(self._tick_s, self._go_on, left - 1)


async def serve(count: int, tick_s: float) -> None:
    """Listen on `count` free ports, print them, go on for ever."""
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(lambda: Worker(tick_s), "127.0.0.1", 0) for _ in range(count)
    ]
    ports = [str(server.sockets[0].getsockname()[1]) for server in servers]
    print("READY", *ports, flush=True)
    await asyncio.Event().wait()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--tick-ms", type=float, default=5.0)
    flags = parser.parse_args()
    uvloop.run(serve(flags.workers, flags.tick_ms / 1000))
    return 0


if __name__ == "__main__":
    sys.exit(main())
