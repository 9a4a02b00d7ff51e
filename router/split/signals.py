"""How much each part of a split fleet has to do, as a share of what it can: what to add shows so.

Those that compute prompts, those that answer, and the way between them can each be too small; the
fleet is balanced where none of the three comes to 1 long before the others.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from events.load import DECODE, PREFILL
from events.scale import ScaleSignal
from router.fleet.board import backlog_ms
from router.fleet.fleet import Fleet
from router.fleet.member import Member
from router.split.hand_off import Splitter
from router.telemetry.metrics import Metrics, Sample


class RoleSignals:
    """Read when somebody asks. Replicas that do both count for no part."""

    def __init__(self, fleet: Fleet, splitter: Splitter) -> None:
        self._fleet = fleet
        self._splitter = splitter

    @property
    def prefill(self) -> float:
        """On average: the share of their time that prompts take lately, and the seconds of work
        that wait at each. Above 1 they fall behind."""
        members = self._of(PREFILL)
        loads = [of.usage.share + 1e-3 * backlog_ms(of) for of in members]
        return sum(loads) / max(1, len(loads))

    @property
    def decode(self) -> float:
        """On average: what they run, and what is on its way to them, of what they may; or the KV
        in use of all, where that is more."""
        loads = [max(self._seats(of), _kv(of)) for of in self._of(DECODE)]
        return sum(loads) / max(1, len(loads))

    @property
    def transfer(self) -> float:
        """Of the time that a hand-off takes lately, the share in which blocks only move."""
        return self._splitter.moving_share

    def on(self, signal: ScaleSignal) -> ScaleSignal:
        """The signal with those of the parts."""
        return replace(
            signal,
            prefill_pressure=self.prefill,
            decode_pressure=self.decode,
            transfer_pressure=self.transfer,
        )

    def _of(self, role: str) -> list[Member]:
        members = [m for name in self._fleet.pools() for m in self._fleet.members(name)]
        return [m for m in members if m.hello.role == role and m.linked and not m.misfits]

    def _seats(self, member: Member) -> float:
        quota, load = self._splitter.quota, member.load
        running = 0 if load is None else load.running + load.waiting
        return (running + quota.pledged(member.replica)) / quota.limit(member)


def _kv(member: Member) -> float:
    load = member.load
    if load is None or not load.total_blocks:
        return 0.0
    return 1.0 - (load.free_blocks + load.cached_blocks) / load.total_blocks


def register_split(metrics: Metrics, splitter: Splitter, signals: RoleSignals) -> None:
    """What became of requests in a fleet with roles, and how its parts do."""

    def verdicts() -> Iterable[Sample]:
        return [((verdict,), count) for verdict, count in splitter.totals.items()]

    metrics.counters(
        "hand_offs",
        "Requests by whether another replica computed their prompt, or why not",
        ("verdict",),
        verdicts,
    )
    metrics.counters(
        "hand_offs_taken_over",
        "Those that a second replica was asked for, since the first failed or fell silent",
        (),
        lambda: [((), splitter.taken_over)],
    )
    metrics.counters(
        "hand_off_tokens", "Prompt tokens so computed", (), lambda: [((), splitter.tokens)]
    )
    metrics.counters(
        "hand_off_seconds",
        "From the plan until the blocks were in the store",
        (),
        lambda: [((), splitter.took_ms / 1e3)],
    )
    metrics.gauge("hand_offs_running", "Under way", lambda: splitter.running)
    metrics.gauges(
        "part_pressure",
        "Load of those that compute prompts, of those that answer, and of the way between them",
        ("part",),
        lambda: [
            (("prefill",), signals.prefill),
            (("decode",), signals.decode),
            (("transfer",), signals.transfer),
        ],
    )
