"""A fleet of replicas that only count time, driven by a trace: arrivals, FCFS prefill, LRU cache.

Reports and digests reach the router late, as on a real bus. Small on purpose: it serves tests of
the choice, not studies.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import mmh3
import msgspec
import numpy as np

from configs.schema import RouterConfig
from events.decision import RouteDecision
from events.digest import CountingDigest, halves_of
from events.load import DigestShape, PrefillFit, ReplicaHello
from kvstore.identity import KeyChain
from router.choice.choose import RouterBrain
from router.choice.route import Outcome, RouteQuery
from router.fleet.expected import pool_name
from router.fleet.fleet import Fleet
from tests.router.kit import EXPECTED, LAYOUT, Clock, hello, load

TRACE_BLOCK_TOKENS = 512
BUS_S = 0.06
REPORT_S = 0.25
DECODE_S_PER_TOKEN = 0.01
TRACE_HELLO = hello(
    layout=msgspec.structs.replace(LAYOUT, block_tokens=TRACE_BLOCK_TOKENS),
    digest=DigestShape(bits=1 << 15, k=8),
    context_tokens=1 << 20,
    max_running=512,
    device="cuda",
)


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a trace; `keys` are 16 bytes per full block."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[bytes, ...]


@dataclass(slots=True)
class Report:
    """What a replay showed."""

    ttft_s: list[float] = field(default_factory=list)
    placed: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def p95_ttft_s(self) -> float:
        return float(np.percentile(self.ttft_s, 95))

    def mean_ttft_s(self) -> float:
        return float(np.mean(self.ttft_s))

    def hit_ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    def imbalance(self, replicas: int) -> float:
        return max(self.placed.values()) * replicas / sum(self.placed.values())


def mooncake(path: Path, rows: int) -> list[Call]:
    """The first rows of a trace; equal times are spread within their 3 s bin."""
    calls = []
    rng = random.Random(7)
    for line in path.read_text().splitlines()[:rows]:
        row = json.loads(line)
        full = row["input_length"] // TRACE_BLOCK_TOKENS
        keys = tuple(mmh3.hash_bytes(str(number)) for number in row["hash_ids"][:full])
        at_s = row["timestamp"] / 1e3 + rng.uniform(0, 3)
        calls.append(Call(at_s, row["input_length"], row["output_length"], keys))
    return sorted(calls, key=lambda call: call.at_s)


class Replica:
    """One prefill at a time, then decode beside the others; blocks cached after their prefill."""

    def __init__(self, name: str, blocks: int, fit: PrefillFit, shape: DigestShape) -> None:
        self.name, self.blocks, self.fit = name, blocks, fit
        self.waiting: deque[tuple[Call, RouteDecision]] = deque()
        self.busy = False
        self.running: dict[str, int] = {}
        self.cache: OrderedDict[bytes, None] = OrderedDict()
        self.digest = CountingDigest(shape)
        self.seq = 0
        self.seen = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def cached_blocks(self, call: Call) -> int:
        depth = 0
        while depth < len(call.keys) and call.keys[depth] in self.cache:
            depth += 1
        return depth

    def store(self, call: Call) -> None:
        new = [key for key in call.keys if key not in self.cache]
        if new:
            self.digest.store(halves_of(new))
        for key in reversed(call.keys):
            self.cache[key] = None
            self.cache.move_to_end(key)
        gone = [self.cache.popitem(last=False)[0] for _ in range(len(self.cache) - self.blocks)]
        if gone:
            self.digest.remove(halves_of(gone))


class Replay:
    """Runs one policy over one trace."""

    def __init__(
        self,
        policy: str,
        replicas: int,
        blocks: int,
        tokens_per_s: float,
        says: ReplicaHello = TRACE_HELLO,
    ) -> None:
        self.clock = Clock()
        self.says = says
        self.block_tokens = says.layout.block_tokens
        self.fleet = Fleet(replace(EXPECTED, block_tokens=frozenset()), self.clock)
        self.brain = RouterBrain(
            self.fleet, RouterConfig(policy=policy), self.clock, random.Random(3)
        )
        fit = PrefillFit(5.0, 1e3 / tokens_per_s, 0.0, 1.0)
        self.replicas = {
            f"r{n}": Replica(f"r{n}", blocks, fit, says.digest) for n in range(replicas)
        }
        self.report = Report()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._left = 0
        self._arrived_s: dict[str, float] = {}

    def run(self, calls: Iterable[Call]) -> Report:
        calls = list(calls)
        start_s = self.clock.now_s
        for name, replica in self.replicas.items():
            self.fleet.on_hello(name, 1, self.says)
            self.fleet.link_state(name, 1, True)
            self.fleet.on_digest_reset(name, 1, 1, 0, self.says.digest, replica.digest.snapshot())
            self._at(0.0, lambda replica=replica: self._publish(replica))
        for call in calls:
            self._at(call.at_s - calls[0].at_s, lambda call=call: self._arrive(call))
        self._left = len(calls)
        while self._left:
            at_s, _, act = heapq.heappop(self._events)
            self.clock.now_s = max(start_s, at_s)
            act()
        return self.report

    def _at(self, delay_s: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (self.clock.now_s + delay_s, self._order, act))

    def _arrive(self, call: Call) -> None:
        query = RouteQuery(
            request_id=str(self._order),
            attempt=1,
            tenant="t",
            pool=pool_name(self.says),
            chain=KeyChain(b"".join(call.keys), b""),
            prompt_tokens=call.prompt_tokens,
            max_tokens=call.output_tokens,
            block_tokens=self.block_tokens,
        )
        decision = self.brain.decide(query)
        assert isinstance(decision, RouteDecision)
        replica = self.replicas[decision.replica]
        self.report.placed[replica.name] += 1
        replica.seen = decision.dispatch_seq
        replica.waiting.append((call, decision))
        self._arrived_s[decision.decision_id] = self.clock.now_s
        self._next(replica)

    def _next(self, replica: Replica) -> None:
        if replica.busy or not replica.waiting:
            return
        replica.busy = True
        call, decision = replica.waiting.popleft()
        cached = min(replica.cached_blocks(call) * self.block_tokens, call.prompt_tokens - 1)
        took_ms = replica.fit.predict_ms(cached, call.prompt_tokens - cached)
        self._at(1e-3 * took_ms, lambda: self._first_token(replica, call, decision, cached))

    def _first_token(
        self, replica: Replica, call: Call, decision: RouteDecision, cached: int
    ) -> None:
        replica.busy = False
        replica.store(call)
        replica.prompt_tokens += call.prompt_tokens
        replica.cached_tokens += cached
        replica.running[decision.decision_id] = call.prompt_tokens
        ttft_s = self.clock.now_s - self._arrived_s.pop(decision.decision_id)
        self.report.ttft_s.append(ttft_s)
        self.report.prompt_tokens += call.prompt_tokens
        self.report.cached_tokens += cached
        self.brain.first_token(decision.decision_id, cached, call.prompt_tokens, 1e3 * ttft_s)
        decode_s = call.output_tokens * DECODE_S_PER_TOKEN
        self._at(decode_s, lambda: self._finish(replica, call, decision, cached))
        self._next(replica)

    def _finish(self, replica: Replica, call: Call, decision: RouteDecision, cached: int) -> None:
        del replica.running[decision.decision_id]
        self._left -= 1
        outcome = Outcome("ok", False, cached, call.prompt_tokens, call.output_tokens)
        self.brain.finish(decision.decision_id, outcome)

    def _publish(self, replica: Replica) -> None:
        """Digest and load as of now; they arrive a bus delay later."""
        became_set, became_clear = replica.digest.take_delta()
        replica.seq += 1
        seq = replica.seq
        queued = sum(
            call.prompt_tokens - replica.cached_blocks(call) * self.block_tokens
            for call, _ in replica.waiting
        )
        report = load(
            digest_seq=seq,
            waiting=len(replica.waiting),
            running=len(replica.running) + replica.busy,
            queued_prefill_tokens=queued,
            running_context_tokens=sum(replica.running.values()),
            free_blocks=replica.blocks - len(replica.cache),
            cached_blocks=len(replica.cache),
            total_blocks=replica.blocks,
            prefill=replica.fit,
            decode=msgspec.structs.replace(load().decode, base=10.0, per_row=0.1),
            seen={self.brain.router_boot: replica.seen},
            prompt_tokens_total=replica.prompt_tokens,
            cached_tokens_total=replica.cached_tokens,
        )

        def arrive() -> None:
            self.fleet.on_digest_delta(replica.name, 1, seq, became_set, became_clear)
            self.fleet.on_load(replica.name, 1, report)

        self._at(BUS_S, arrive)
        self._at(REPORT_S, lambda: self._publish(replica))
