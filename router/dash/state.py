"""What the dashboard shows: built from bus messages alone, bounded in every direction.

It knows nothing that the bus does not carry, so no prompt, key or token can reach the page.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from typing import Any

import msgspec

from events.alarm import AlarmNotice
from events.decision import RouteDecision, RouteOutcome
from events.envelope import unseal
from events.errors import WireError
from events.load import ReplicaHello, ReplicaLoad
from events.subjects import check_id, split
from events.wire import decode

MAX_REPLICAS = 256
MAX_DECISIONS = 40
MAX_ALARMS = 256
MAX_DETAIL_CHARS = 200
HISTORY_S = 300
MAX_MESSAGE_BYTES = 256 * 1024
GONE_S = 30.0
ALARM_GONE_S = 10.0
"""An alarm is repeated every few seconds: what is not heard any more is over, or its router is."""

_hello = msgspec.msgpack.Decoder(ReplicaHello)
_load = msgspec.msgpack.Decoder(ReplicaLoad)
_decisions = msgspec.msgpack.Decoder(tuple[RouteDecision, ...])
_outcomes = msgspec.msgpack.Decoder(tuple[RouteOutcome, ...])
_alarm = msgspec.msgpack.Decoder(AlarmNotice)

_Known = tuple[RouteDecision, RouteOutcome | None]


class _Replica:
    """The newest facts of one replica's current life."""

    def __init__(self, boot: int) -> None:
        self.boot = boot
        self.hello: ReplicaHello | None = None
        self.load: ReplicaLoad | None = None
        self.generation = 0
        self.seq = 0
        self.seen_s = 0.0
        self.digest_s = 0.0

    def view(self, name: str, now_s: float) -> dict[str, Any]:
        load = self.load
        return {
            "replica": name,
            "epoch": self.boot,
            "model": self.hello.model if self.hello else "",
            "device": self.hello.device if self.hello else "",
            "role": self.hello.role if self.hello else "",
            "generation": self.generation,
            "seq": self.seq,
            "silent_ms": round(1e3 * (now_s - self.seen_s)),
            "digest_age_ms": round(1e3 * (now_s - self.digest_s)) if self.digest_s else None,
            "waiting": load.waiting if load else 0,
            "running": load.running if load else 0,
            "queued_prefill_tokens": load.queued_prefill_tokens if load else 0,
            "free_blocks": load.free_blocks if load else 0,
            "cached_blocks": load.cached_blocks if load else 0,
            "total_blocks": load.total_blocks if load else 0,
            "step_ms": round(load.step_ms, 1) if load else 0.0,
            "draining": load.draining if load else False,
        }


class DashboardState:
    """Feed it bus messages; ask it for a view. Never raises on what comes in."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._decisions: OrderedDict[str, _Known] = OrderedDict()
        self._alarms: dict[tuple[str, str, str], tuple[AlarmNotice, float]] = {}
        self._seconds: deque[list[float]] = deque(maxlen=HISTORY_S)
        self.malformed = 0

    def take(self, subject: str, payload: bytes, now_s: float) -> None:
        """One bus message. Malformed ones are counted."""
        try:
            role, name, kind = split(subject)
            if role == "replica":
                self._take_replica(name, kind, payload, now_s)
            elif role == "router":
                self._take_router(name, kind, payload, now_s)
        except (WireError, ValueError):
            self.malformed += 1

    def _take_replica(self, name: str, kind: str, payload: bytes, now_s: float) -> None:
        envelope = unseal(payload)
        known = self._replicas.get(name)
        if known is None or envelope.boot > known.boot:
            if known is None and len(self._replicas) >= MAX_REPLICAS:
                return
            known = self._replicas[name] = _Replica(envelope.boot)
        if envelope.boot < known.boot:
            return
        if kind == "bye":
            del self._replicas[name]
            return
        known.seen_s = now_s
        if kind == "hello":
            known.hello = decode(_hello, bytes(envelope.payload), MAX_MESSAGE_BYTES)
        elif kind == "load":
            known.load = decode(_load, bytes(envelope.payload), MAX_MESSAGE_BYTES)
            if (known.load.digest_generation, known.load.digest_seq) == (
                known.generation,
                known.seq,
            ):
                known.digest_s = now_s
        elif kind == "digest":
            known.generation, known.seq, known.digest_s = envelope.generation, envelope.seq, now_s

    def _take_router(self, name: str, kind: str, payload: bytes, now_s: float) -> None:
        if kind == "decisions":
            for made in decode(_decisions, payload, MAX_MESSAGE_BYTES):
                self._decisions[made.decision_id] = made, None
            while len(self._decisions) > MAX_DECISIONS:
                self._decisions.popitem(last=False)
        elif kind == "outcomes":
            for ended in decode(_outcomes, payload, MAX_MESSAGE_BYTES):
                if ended.decision_id in self._decisions:
                    made, _ = self._decisions[ended.decision_id]
                    self._decisions[ended.decision_id] = made, ended
                self._count(ended, now_s)
        elif kind == "alarm":
            self._take_alarm(name, decode(_alarm, payload, MAX_MESSAGE_BYTES), now_s)

    def _take_alarm(self, router: str, notice: AlarmNotice, now_s: float) -> None:
        if not math.isfinite(notice.age_ms):
            raise ValueError("an age is a number")
        key = (check_id(notice.name), check_id(notice.replica), router)
        self._forget_alarms(now_s)
        if not notice.active:
            self._alarms.pop(key, None)
        elif key in self._alarms or len(self._alarms) < MAX_ALARMS:
            self._alarms[key] = notice, now_s

    def _count(self, ended: RouteOutcome, now_s: float) -> None:
        second = float(int(now_s))
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0])
        self._seconds[-1][1] += ended.prompt_tokens
        self._seconds[-1][2] += ended.cached_tokens

    def view(self, now_s: float) -> dict[str, Any]:
        """What the page draws; `seconds` rows are (seconds ago, prompt tokens, cached tokens)."""
        gone = [name for name, of in self._replicas.items() if now_s - of.seen_s > GONE_S]
        for name in gone:
            del self._replicas[name]
        return {
            "alarms": self._view_alarms(now_s),
            "replicas": [of.view(name, now_s) for name, of in sorted(self._replicas.items())],
            "decisions": [
                {**msgspec.to_builtins(made), "outcome": msgspec.to_builtins(ended)}
                for made, ended in reversed(self._decisions.values())
            ],
            "seconds": [
                [int(now_s) - at, prompt, cached]
                for at, prompt, cached in self._seconds
                if now_s - at <= HISTORY_S
            ],
        }

    def _forget_alarms(self, now_s: float) -> None:
        heard = self._alarms.items()
        self._alarms = {key: of for key, of in heard if now_s - of[1] <= ALARM_GONE_S}

    def _view_alarms(self, now_s: float) -> list[dict[str, Any]]:
        self._forget_alarms(now_s)
        return [
            {
                "name": name,
                "replica": replica,
                "router": router,
                "age_ms": round(notice.age_ms + 1e3 * (now_s - seen_s)),
                "detail": notice.detail[:MAX_DETAIL_CHARS],
            }
            for (name, replica, router), (notice, seen_s) in sorted(
                self._alarms.items(), key=lambda item: item[0]
            )
        ]
