"""How many replicas should compute prompts, and how many answer: a worksheet over a trace.

Service times of a device and bytes of KV alone, without queues: which rate each part sustains at
each ratio, with everybody there and with some of a part away. A simulation of the same fleet shows
what queues make of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tools.sim.call import Trace
from tools.sim.profiles import Device

PREFILL, DECODE, TRANSFER, BOTH = "prefill", "decode", "transfer", "both"
BUSY = 0.85
"""Of their time that parts can be kept busy before queues grow long."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a request takes in the mean, in ms: of those that compute, of those that answer (their
    own short prompts included), and of one that does both. `moved_bytes` go from one to the other;
    `seats`: as many are answered at once as the objective for a token allows."""

    prefill_ms: float
    answer_ms: float
    both_ms: float
    moved_bytes: float
    seats: int
    long_share: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """`prefill` replicas beside `decode`: the rates that all of them sustain, and that they do with
    some of the worse part away; what gives out first."""

    prefill: int
    decode: int
    rate_per_s: float
    rate_less_per_s: float
    limit: str

    @property
    def name(self) -> str:
        """As P:D; all that do both at 0."""
        return f"{self.prefill}:{self.decode}"


def work_of(
    trace: Trace, device: Device, kv_tokens: int, slo_tpot_ms: float, min_tokens: int
) -> Work:
    """Of the trace's calls, nothing cached. Prompts of fewer than `min_tokens` are not moved."""
    calls, count = trace.calls, len(trace.calls)
    prompts = [device.prefill.predict_ms(0, call.prompt_tokens) for call in calls]
    long = [call.prompt_tokens >= min_tokens for call in calls]
    answers = sum(call.output_tokens for call in calls)
    context = sum(
        call.output_tokens * (call.prompt_tokens + call.output_tokens / 2) for call in calls
    ) / max(1, answers)
    seats = seats_of(device, context, kv_tokens, slo_tpot_ms)
    token_ms = device.decode.predict_ms(seats, seats * context) / seats
    decode_ms = token_ms * answers / count
    stays = sum(ms for ms, moves in zip(prompts, long, strict=True) if not moves) / count
    moves = sum(ms for ms, is_long in zip(prompts, long, strict=True) if is_long) / count
    tokens = sum(c.prompt_tokens for c, is_long in zip(calls, long, strict=True) if is_long)
    return Work(
        prefill_ms=moves,
        answer_ms=decode_ms + stays,
        both_ms=decode_ms + stays + moves,
        moved_bytes=tokens * device.kv_bytes_per_token / count,
        seats=seats,
        long_share=sum(long) / count,
    )


def seats_of(device: Device, context: float, kv_tokens: int, slo_tpot_ms: float) -> int:
    """How many answers fit in a step within the objective, and in the KV; at least one."""
    fitting = min(device.max_running, int(kv_tokens / max(1.0, context)))
    low, high = 1, max(1, fitting)
    while low < high:
        middle = (low + high + 1) // 2
        within = device.decode.predict_ms(middle, middle * context) <= slo_tpot_ms
        low, high = (middle, high) if within else (low, middle - 1)
    return low


def ratios(work: Work, replicas: int, gbytes_per_s: float, away: int = 1) -> list[Ratio]:
    """All of that many replicas, those that do everything first."""
    all_s, fewer_s = (
        1e3 * BUSY * max(0, replicas - less) / max(1e-9, work.both_ms) for less in (0, away)
    )
    found = [Ratio(0, replicas, all_s, fewer_s, BOTH)]
    for prefill in range(1, replicas):
        decode = replicas - prefill
        rate, limit = _rate(work, prefill, decode, gbytes_per_s)
        less = min(
            _rate(work, prefill - away, decode, gbytes_per_s)[0],
            _rate(work, prefill, decode - away, gbytes_per_s)[0],
        )
        found.append(Ratio(prefill, decode, rate, less, limit))
    return found


def best(found: Iterable[Ratio]) -> Ratio:
    """Of the split ones, what sustains most with some away; of equal ones, with all there."""
    split = [ratio for ratio in found if ratio.prefill]
    return max(split, key=lambda ratio: (round(ratio.rate_less_per_s, 9), ratio.rate_per_s))


def _rate(work: Work, prefill: int, decode: int, gbytes_per_s: float) -> tuple[float, str]:
    """Requests per s, and the part that allows no more. Without anybody to compute, those that
    answer do it."""
    if decode <= 0:
        return 0.0, DECODE
    if prefill <= 0:
        return 1e3 * BUSY * decode / max(1e-9, work.both_ms), DECODE
    limits = {
        PREFILL: 1e3 * BUSY * prefill / max(1e-9, work.prefill_ms),
        DECODE: 1e3 * BUSY * decode / max(1e-9, work.answer_ms),
        TRANSFER: 1e9 * BUSY * gbytes_per_s * min(prefill, decode) / max(1e-9, work.moved_bytes),
    }
    limit = min(limits, key=limits.__getitem__)
    return limits[limit], limit
