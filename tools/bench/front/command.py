"""The front as a thread of the engine's process, and as a process of its own: which is better?

The real model decodes; a router's end of the link reads. For each way, in turn: how late the
front's event loop is, the gaps between a stream's tokens at the reader, tokens a second, and CPU
time for a token. The process of its own is a prototype (tools/bench/front/apart.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import aiohttp
import numpy as np

from events.output import StepFrame
from events.request import LINK_VERSION, CoreRequest, LinkHello, SamplingParams
from events.wire import decode_replica_frame, encode
from tools.bench.child import Child
from tools.bench.front.serve import MAX_ROWS, MODEL, SECRET
from tools.flags import output_file, positive

WAYS = {"thread": [], "process": ["--apart"]}
PROMPT_TOKENS = 32
START_S = 120.0


def main(argv: Sequence[str]) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="warmroute bench front", description=__doc__)
    add = parser.add_argument
    add("--rows", type=positive, default=16, help="streams at once (%(default)s)")
    add("--tokens", type=positive, default=96, help="of each answer (%(default)s)")
    add("--rounds", type=positive, default=3, help="the median of so many (%(default)s)")
    add("--json", type=output_file, metavar="FILE", help="write the figures here")
    flags = parser.parse_args(argv)
    if flags.rows > MAX_ROWS:
        parser.error(f"--rows: at most {MAX_ROWS}")
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(flags.rounds):
        order = list(WAYS) if number % 2 == 0 else list(reversed(WAYS))
        for way in order:
            rounds[way].append(_round(way, flags.rows, flags.tokens))
    found = {
        way: {name: median(each[name] for each in several) for name in several[0]}
        for way, several in rounds.items()
    }
    for way, figures in found.items():
        print(f"{way:>8}  " + "  ".join(f"{name} {value:.4g}" for name, value in figures.items()))
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def _round(way: str, rows: int, tokens: int) -> dict[str, float]:
    command = [sys.executable, "-m", "tools.bench.front.serve", *WAYS[way]]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with Child(command, None, log, talks=True) as child:
            port = int(child.answer(START_S))
            asyncio.run(_load(port, rows, 8))
            child.tell(b"reset")
            cpu_s = child.cpu_s()
            gaps_ms, seconds = asyncio.run(_load(port, rows, tokens))
            cpu_s = child.cpu_s() - cpu_s
            child.tell(b"figures")
            lag = json.loads(child.answer(START_S))
    itl = np.quantile(gaps_ms, [0.5, 0.99])
    return {
        **lag,
        "itl_p50_ms": float(itl[0]),
        "itl_p99_ms": float(itl[1]),
        "tokens_per_s": rows * tokens / seconds,
        "cpu_ms_per_token": 1e3 * cpu_s / (rows * tokens),
    }


async def _load(port: int, rows: int, tokens: int) -> tuple[list[float], float]:
    """The gaps between tokens of all streams, in ms, and the seconds that it took."""
    url = f"http://127.0.0.1:{port}/link"
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(url, max_msg_size=0) as socket,
    ):
        hello = LinkHello(version=LINK_VERSION, router_id="r", router_boot="b", secret=SECRET)
        await socket.send_bytes(encode(hello))
        await socket.receive_bytes()
        began_s = time.perf_counter()
        for row in range(rows):
            await socket.send_bytes(encode(_request(row, tokens)))
        gaps_ms = await _read(socket, rows)
        return gaps_ms, time.perf_counter() - began_s


async def _read(socket: aiohttp.ClientWebSocketResponse, rows: int) -> list[float]:
    gaps_ms: list[float] = []
    last_s: dict[str, float] = {}
    left = rows
    while left:
        frame = decode_replica_frame(await socket.receive_bytes())
        now_s = time.perf_counter()
        for delta in frame.deltas if isinstance(frame, StepFrame) else ():
            if delta.request_id in last_s:
                gaps_ms.append(1e3 * (now_s - last_s[delta.request_id]))
            last_s[delta.request_id] = now_s
            if delta.finish is not None:
                if delta.finish.error is not None:
                    raise RuntimeError(delta.finish.error.message)
                left -= 1
    return gaps_ms


def _request(row: int, tokens: int) -> CoreRequest:
    prompt = array("I", ((row * 7_919 + place) % 40_000 + 100 for place in range(PROMPT_TOKENS)))
    sampling = SamplingParams(max_tokens=tokens, seed=row, temperature=0.0, ignore_eos=True)
    return CoreRequest(
        request_id=f"r{row}-{tokens}",
        attempt=1,
        trace_id="bench",
        tenant="bench",
        model=MODEL,
        prompt=prompt.tobytes(),
        salt=b"bench",
        sampling=sampling,
        router_boot="b",
        dispatch_seq=row,
    )
