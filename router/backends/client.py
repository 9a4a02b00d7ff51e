"""HTTP to one backend: pooled connections, no redirects, answers as raw bytes.

A server closes a connection that was idle for long, and may do so while a request is on its way: so
ours are given up before that, and a reused one that fails before any byte is replaced once.
"""

from __future__ import annotations

from types import SimpleNamespace

import aiohttp

from router.backends.roster import Backend

CONNECT_S = 5.0
READ_BYTES = 256 * 1024


async def _note_reuse(
    session: aiohttp.ClientSession, context: SimpleNamespace, params: object
) -> None:
    context.trace_request_ctx.reused = True


class BackendClient:
    """Open it on the event loop; `close` ends every connection."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "warmroute"}
        if backend.key:
            self._headers["Authorization"] = f"Bearer {backend.key}"
        idle_s = backend.config.idle_connection_s
        self._pooled = self._session(aiohttp.TCPConnector(limit=0, keepalive_timeout=idle_s))
        self._fresh = self._session(aiohttp.TCPConnector(limit=0, force_close=True))

    async def close(self) -> None:
        """End every connection."""
        await self._pooled.close()
        await self._fresh.close()

    async def post(self, path: str, body: bytes, headers: dict[str, str]) -> aiohttp.ClientResponse:
        """The answer's head; close the response. Raises aiohttp.ClientError or OSError."""
        url, context = self.backend.url + path, SimpleNamespace(reused=False)
        try:
            return await self._pooled.post(
                url, data=body, headers=headers, allow_redirects=False, trace_request_ctx=context
            )
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if not context.reused:
                raise
        return await self._fresh.post(url, data=body, headers=headers, allow_redirects=False)

    async def probe(self, path: str) -> int:
        """The status of a GET. Raises aiohttp.ClientError or OSError."""
        async with self._pooled.get(
            self.backend.url + path,
            allow_redirects=False,
            trace_request_ctx=SimpleNamespace(reused=False),
        ) as response:
            return response.status

    async def read(self, path: str, most_bytes: int) -> bytes:
        """What a GET gives; empty unless it is a 200. Raises aiohttp.ClientError or OSError."""
        async with self._pooled.get(
            self.backend.url + path,
            allow_redirects=False,
            trace_request_ctx=SimpleNamespace(reused=False),
        ) as response:
            return await response.content.read(most_bytes) if response.status == 200 else b""

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        return aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=READ_BYTES,
            trace_configs=[trace] if not connector.force_close else [],
            trust_env=False,
        )
