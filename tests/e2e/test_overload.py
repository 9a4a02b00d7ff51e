"""O4, O3 on real processes: an open-loop ramp to ten times the capacity. Memory stays flat, who is
accepted is served in time, who is refused is told when to come again, and it is over when it is.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import openai
import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.up import Up

DEADLINE_S = 3.0
RAMP_S, HOLD_S = 4.0, 6.0
TIMES = 10
LATELY_S = 1.0
LATE_S = 2.0
"""What generator, router and replicas on one processor may add to the deadline."""
RECOVERED_S = 5.0
WELL_S = 1.0
FEW_S = 0.5
"""A few at once wait no longer for their first tokens where nothing else runs on the machine; where
they do, all takes longer by as much."""
MORE_MIB = 96
"""Pools are touched for the first time, and caches fill up to their bounds: 50 to 65 of it."""
CLIENTS = 12
"""Of the official library, with its defaults, beside the flood."""
_numbers = itertools.count(1)

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Up]:
    """Two replicas of the tiny model; few may wait, so that the bound is soon reached."""
    monkeypatch.setenv("WARMROUTE_ROUTER__MAX_QUEUED_REQUESTS", "60")
    cluster = Up(
        tmp_path / "state",
        *("--port", "0", "--replicas", "2", "--model", str(tiny_model), "--model-name", MODEL),
    )
    try:
        cluster.wait_ready()
        admin = json.loads((cluster.state / "keys.json").read_text())["admin_key"]
        policy = json.dumps({"ttft_deadline_ms": 1_000 * DEADLINE_S}).encode()
        assert cluster.call("PUT", "/router/tenants/default", policy, admin)[0] == 200
        yield cluster
    finally:
        cluster.close()


def body() -> dict[str, object]:
    """A prompt that nobody has sent before, and an answer that takes its time."""
    number = next(_numbers)
    prompt = " ".join(f"{number * 7_919 + word}" for word in range(60))
    return {"model": MODEL, "prompt": prompt, "max_tokens": 48, "ignore_eos": True}


class Flood:
    """Asks without waiting for answers. `ttfts_s` of those that were accepted."""

    def __init__(self, cluster: Up, http: aiohttp.ClientSession) -> None:
        self.statuses: Counter[int] = Counter()
        self.ttfts_s: list[float] = []
        self.broken = 0
        self._ended_s: deque[float] = deque()
        self._url = f"{cluster.url}/v1/completions"
        self._headers = {"Authorization": f"Bearer {cluster.key}"}
        self._http = http
        self._asked: set[asyncio.Task[object]] = set()

    async def one(self) -> float | None:
        """Its TTFT in seconds; None where it was refused."""
        began_s = time.monotonic()
        asked = {**body(), "stream": True}
        async with self._http.post(self._url, json=asked, headers=self._headers) as response:
            self.statuses[response.status] += 1
            if response.status != 200:
                assert 1 <= int(response.headers["Retry-After"]) <= 60
                code = (await response.json())["error"]["code"]
                assert code in ("overloaded", "deadline")
                return None
            await response.content.readuntil(b"\n\n")
            self.ttfts_s.append(time.monotonic() - began_s)
            self.broken += not (await response.read()).endswith(b"data: [DONE]\n\n")
            self._ended_s.append(time.monotonic())
            return self.ttfts_s[-1]

    def ask(self) -> None:
        task: asyncio.Task[object] = asyncio.create_task(self.one())
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    async def over(self) -> None:
        await asyncio.gather(*self._asked)

    async def few(self, seconds: float = 3.0) -> None:
        """Some who wait for their answers."""
        until_s = time.monotonic() + seconds

        async def some() -> None:
            while time.monotonic() < until_s:
                await self.one()

        await asyncio.gather(*(some() for _ in range(8)))

    def served_per_s(self) -> float:
        """Lately, and so at what speed the machine is now."""
        since_s = time.monotonic() - LATELY_S
        while self._ended_s and self._ended_s[0] < since_s:
            self._ended_s.popleft()
        return len(self._ended_s) / LATELY_S

    async def ramp(self) -> float:
        """Up to TIMES the capacity, and there for a while. The capacity is the most that was ever
        served: who else uses the machine may leave it meanwhile."""
        began_s, owed, capacity_per_s = time.monotonic(), 0.0, 0.0
        before_s = began_s
        while (now_s := time.monotonic()) < began_s + RAMP_S + HOLD_S:
            capacity_per_s = max(capacity_per_s, self.served_per_s())
            share = min(1.0, (now_s - began_s) / RAMP_S)
            owed += (now_s - before_s) * capacity_per_s * (1 + share * (TIMES - 1))
            before_s = now_s
            while owed >= 1:
                owed -= 1
                self.ask()
            await asyncio.sleep(0.01)
        return capacity_per_s


def resident_mib(cluster: Up) -> float:
    """Of all processes together."""
    pages = 0
    for pid in cluster.children():
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * 4096 / 2**20


async def most_mib(cluster: Up) -> float:
    """Until cancelled."""
    most = 0.0
    try:
        while True:
            most = max(most, await asyncio.to_thread(resident_mib, cluster))
            await asyncio.sleep(0.2)
    except asyncio.CancelledError:
        return most


async def patient(client: openai.AsyncOpenAI, ends: Counter[str]) -> None:
    """The official client, which repeats by itself what may be repeated."""
    asked = body()
    extra = {"ignore_eos": asked.pop("ignore_eos")}
    try:
        await client.completions.create(**asked, extra_body=extra)
        ends["served"] += 1
    except openai.RateLimitError:
        ends["refused"] += 1


def metric(cluster: Up, name: str) -> float:
    lines = cluster.call("GET", "/metrics")[1].splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


async def test_O3_O4_ten_times_the_capacity_costs_only_those_who_are_refused(cluster: Up) -> None:
    limits = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(connector=limits) as http,
        openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=cluster.key) as client,
    ):
        flood = Flood(cluster, http)
        await flood.few()
        slow = max(1.0, max(flood.ttfts_s) / FEW_S)
        flood.statuses.clear()
        flood.ttfts_s.clear()
        before_mib = resident_mib(cluster)
        memory, ends = asyncio.create_task(most_mib(cluster)), Counter[str]()
        clients = [asyncio.create_task(patient(client, ends)) for _ in range(CLIENTS)]
        capacity_per_s = await flood.ramp()
        ended_s = time.monotonic()
        # Once the flood has ended, somebody new is soon served as if there had been none.
        while (ttft_s := await flood.one()) is None or ttft_s > slow * WELL_S:
            assert time.monotonic() - ended_s < slow * RECOVERED_S
            await asyncio.sleep(0.1)
        await flood.over()
        await asyncio.gather(*clients)
        memory.cancel()
        most = await memory
    print(slow, capacity_per_s, flood.statuses, sorted(flood.ttfts_s)[-20:], before_mib, most, ends)
    assert set(flood.statuses) == {200, 429}
    assert flood.broken == 0
    assert flood.statuses[429] > flood.statuses[200]
    assert sorted(flood.ttfts_s)[int(0.95 * len(flood.ttfts_s))] < DEADLINE_S + slow * LATE_S
    assert most < before_mib + MORE_MIB
    assert ends.total() == CLIENTS
    assert metric(cluster, "warmroute_client_retries_total") <= 2 * CLIENTS
    assert metric(cluster, "warmroute_inflight_requests") == 0
