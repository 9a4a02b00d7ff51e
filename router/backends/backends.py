"""All backends of this router: their places in the fleet, connections, probes, and the relay."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import aiohttp
import msgspec

from configs.model.card import ModelCard
from configs.schema import ClusterConfig
from router.backends.client import BackendClient
from router.backends.join import Joiner, Seat
from router.backends.relay import Relay
from router.backends.roster import hello_of, roster
from router.fleet.fleet import Fleet
from router.telemetry.metrics import Metrics

PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 2.0
PROBE_PATHS = ("/health", "/v1/models")
NOT_THERE = (404, 405, 501)
MAX_MODELS_BYTES = 1024 * 1024


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)


class Backends:
    """Nothing is dialled before `start`. `feed` is what the bus's feed has to talk to."""

    def __init__(
        self, config: ClusterConfig, card: ModelCard, fleet: Fleet, metrics: Metrics
    ) -> None:
        """Raises ValueError on a backend that can't be used."""
        self.seats: Mapping[str, Seat] = {
            backend.id: Seat(backend, hello_of(backend, config, card))
            for backend in roster(config).values()
        }
        self._clients: dict[str, BackendClient] = {}
        self._patience_s = config.router.first_token_timeout_s
        self.feed = Joiner(fleet, self.seats)
        self.relay = Relay(self.seats, self._clients, config.router, metrics, fleet.alarms)
        self._first = asyncio.Event()
        self._probing: list[asyncio.Task[None]] = []

    @property
    def up(self) -> int:
        """Backends that answer."""
        return sum(seat.health.up for seat in self.seats.values())

    async def start(self) -> None:
        """Begin to probe."""
        for seat in self.seats.values():
            client = self._clients[seat.backend.id] = BackendClient(seat.backend)
            self._probing.append(asyncio.create_task(self._probe_forever(seat, client)))

    async def close(self) -> None:
        """End probes and connections."""
        for task in self._probing:
            task.cancel()
        await asyncio.gather(*self._probing, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    async def wait_up(self) -> None:
        """Until the first one answers; for ever where there is none."""
        await self._first.wait()

    async def _probe_forever(self, seat: Seat, client: BackendClient) -> None:
        paths = list(PROBE_PATHS)
        while True:
            status = await _status(client, paths[0])
            if status in NOT_THERE and len(paths) > 1:
                paths.pop(0)
                continue
            if not seat.health.up and 200 <= status < 300:
                seat.limit_context(await _context_tokens(client, seat.backend.model))
            self.feed.probed(seat, 200 <= status < 300)
            self.feed.watch(seat, self._patience_s)
            if seat.health.up:
                self._first.set()
            await asyncio.sleep(PROBE_EVERY_S * random.uniform(0.75, 1.25))


async def _context_tokens(client: BackendClient, model: str) -> int | None:
    """The longest prompt and answer of a model, as vLLM and SGLang say it; None where it is not
    told."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            told = _models.decode(await client.read("/v1/models", MAX_MODELS_BYTES))
    except (TimeoutError, aiohttp.ClientError, OSError, msgspec.MsgspecError, RecursionError):
        return None
    lengths = [one.max_model_len for one in told.data if one.id == model]
    return next((length for length in lengths if length is not None and length > 0), None)


async def _status(client: BackendClient, path: str) -> int:
    """Of a GET; 0 without an answer."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            return await client.probe(path)
    except (TimeoutError, aiohttp.ClientError, OSError):
        return 0
