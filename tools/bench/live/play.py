"""The client's process, as its parent sees it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from tools.bench.client import Sample
from tools.bench.live.client import Answered, Whole
from tools.bench.live.plan import Plan
from tools.errors import CommandError

MAX_LINE_BYTES = 16 * 1024 * 1024
MARGIN_S = 330.0
"""Beyond the last arrival: a request ends by itself before."""


@dataclass(frozen=True, slots=True)
class Played:
    """One plan's outcome: samples in the plan's order, and how late each was sent."""

    samples: tuple[Sample, ...]
    late_ms: tuple[float, ...]
    wall_s: float
    client_cpu_s: float


async def play(plan: Plan, tick: Callable[[], None]) -> Played:
    """Runs the client; `tick` is called for each answer. Raises CommandError where it breaks."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tools.bench.live.client"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
    )
    asks = plan.asks
    bound_s = MARGIN_S * (len(asks) if plan.in_turn else 1) + max(ask.at_s for ask in asks)
    try:
        async with asyncio.timeout(bound_s):
            return await _played(process, plan, tick)
    except TimeoutError:
        raise CommandError(f"the client did not end within {bound_s:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _played(
    process: asyncio.subprocess.Process, plan: Plan, tick: Callable[[], None]
) -> Played:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(msgspec.json.encode(plan))
    process.stdin.write_eof()
    answers: dict[int, Answered] = {}
    while line := await process.stdout.readline():
        if b'"place"' not in line[:10]:
            whole = msgspec.json.decode(line, type=Whole)
            break
        answer = msgspec.json.decode(line, type=Answered)
        answers[answer.place] = answer
        tick()
    else:
        said = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
        raise CommandError(f"the client broke: {said[-1] if said else 'it said nothing'}")
    await process.wait()
    ordered = [answers[place] for place in range(len(plan.asks))]
    return Played(
        tuple(answer.sample for answer in ordered),
        tuple(answer.late_ms for answer in ordered),
        whole.wall_s,
        whole.cpu_s,
    )
