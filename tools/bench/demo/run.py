"""Running the load: the same arrivals for each policy, on caches that were emptied before."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from tools.admin import AdminClient
from tools.bench.client import ChatClient, Sample
from tools.bench.demo.ceiling import CeilingCache
from tools.bench.demo.load import Load
from tools.errors import CommandError

Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """All samples of one policy, and the tokens that an infinite cache would have held."""

    policy: str
    samples: tuple[Sample, ...]
    ceiling_tokens: int
    wall_s: float


class DemoRunner:
    """Plays one load against one gateway."""

    def __init__(
        self,
        admin: AdminClient,
        client: ChatClient,
        load: Load,
        ceiling: Callable[[], CeilingCache],
    ) -> None:
        self._admin = admin
        self._client = client
        self._load = load
        self._ceiling = ceiling
        self._known: list[str] = []
        self._keys = {talk.tenant: secrets.token_urlsafe(24) for talk in load.conversations}

    async def prepare(self) -> None:
        """Tenants and the public head, known to the gateway."""
        for tenant, key in self._keys.items():
            await self._admin.put_tenant(tenant, key)
            self._known.append(tenant)
        await self._admin.publish_prefix(
            {"messages": [{"role": "system", "content": self._load.public}]}
        )

    async def forget(self) -> None:
        """Take the tenants away again: no key of the demo opens the gateway afterwards."""
        while self._known:
            await self._admin.delete_tenant(self._known.pop())

    async def cold_request_s(self) -> float:
        """How long one request takes on an idle cluster with empty caches."""
        talk = self._load.conversations[0]
        began = time.perf_counter()
        sample = await self._client.chat(
            talk.tenant,
            self._keys[talk.tenant],
            0,
            [
                {"role": "system", "content": talk.system},
                {"role": "user", "content": talk.questions[0]},
            ],
            self._load.max_tokens,
        )
        if sample.error:
            raise CommandError(f"the first request of the demo failed: {sample.error}")
        return time.perf_counter() - began

    def use(self, load: Load) -> None:
        """Play this load from now on: the same tenants, with arrivals."""
        self._load = load

    async def run(self, policy: str, limit_blocks: int, tick: Tick) -> PolicyRun:
        """One policy, from cold."""
        await self._admin.clear_caches(limit_blocks)
        await self._admin.set_policy(policy)
        ceiling = self._ceiling()
        ceiling.publish([{"role": "system", "content": self._load.public}])
        state = _Play(self._load, self._client, self._keys, ceiling, tick)
        began = time.perf_counter()
        samples = await state.play(began)
        return PolicyRun(policy, samples, state.ceiling_tokens, time.perf_counter() - began)


class _Play:
    """The conversations while they go on: a turn starts at its time, once the turn before ended."""

    def __init__(
        self,
        load: Load,
        client: ChatClient,
        keys: dict[str, str],
        ceiling: CeilingCache,
        tick: Tick,
    ) -> None:
        self._load = load
        self._client = client
        self._keys = keys
        self._ceiling = ceiling
        self._tick = tick
        self._history: list[list[dict[str, str]]] = [
            [{"role": "system", "content": talk.system}] for talk in load.conversations
        ]
        self._turn_locks = [asyncio.Lock() for _ in load.conversations]
        self.ceiling_tokens = 0

    async def play(self, began: float) -> tuple[Sample, ...]:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for arrival in self._load.arrivals:
                await asyncio.sleep(max(0.0, began + arrival.at_s - time.perf_counter()))
                tasks.append(group.create_task(self._turn(arrival.conversation, arrival.turn)))
        return tuple(task.result() for task in tasks)

    async def _turn(self, index: int, turn: int) -> Sample:
        talk = self._load.conversations[index]
        # Locks are fair: the turns of one conversation keep their order.
        async with self._turn_locks[index]:
            history = self._history[index]
            history.append({"role": "user", "content": talk.questions[turn]})
            self.ceiling_tokens += self._ceiling.take(talk.tenant, self._ceiling.tokens(history))
            sample = await self._client.chat(
                talk.tenant, self._keys[talk.tenant], turn, history, self._load.max_tokens
            )
            history.append({"role": "assistant", "content": sample.text})
            self._ceiling.take(talk.tenant, self._ceiling.tokens(history, answer=False))
        self._tick()
        return sample
