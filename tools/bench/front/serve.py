"""The replica's process of this bench: front and link, with the engine in it or beside it.

Says its port, serves until its standard input ends, then says how late its event loop was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time

import numpy as np
import uvloop
from aiohttp import web

from configs.model.card import ModelCard, load_card
from configs.schema import ReplicaConfig
from kvstore.identity import Namespace
from replica.engine.loop import EngineThread
from replica.engine.messages import StepSink
from replica.front.build import Patience, build_front
from replica.front.check import Limits
from replica.front.intake import Served
from replica.front.link import LinkSettings
from replica.front.output import StepQueue
from replica.runner.build import build_runner, kv_layout
from tools.bench.front.apart import EngineApart
from tools.fetch import default_model

KEY = b"k" * 32
SECRET = "front-bench"
MODEL = "bench"
TICK_S = 0.002
MAX_ROWS = 256


def config() -> ReplicaConfig:
    """The replica's settings, the same for both ways."""
    return ReplicaConfig(id="bench", kv_blocks=2_048, max_running=MAX_ROWS)


def make_engine(sink: StepSink) -> EngineThread:
    """The real engine over the default model."""
    settings = config()
    return EngineThread(build_runner(load_card(default_model()), settings), sink, settings, KEY)


class Lag:
    """How much later than asked for the event loop wakes a sleeper, in ms."""

    def __init__(self) -> None:
        self.late_ms: list[float] = []

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            due_s = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self.late_ms.append(1e3 * max(0.0, time.monotonic() - due_s))

    def figures(self) -> dict[str, float]:
        """Quantiles."""
        found = np.quantile(self.late_ms or [0.0], [0.5, 0.99, 1.0])
        return dict(zip(("lag_p50_ms", "lag_p99_ms", "lag_max_ms"), map(float, found), strict=True))


def served(card: ModelCard, settings: ReplicaConfig) -> Served:
    """What the front needs of the model."""
    layout = kv_layout(card, settings)
    return Served(
        limits=Limits(MODEL, card.shape.vocab, settings.context_tokens),
        vocabulary=card.tokenizer,
        eos_ids=card.eos_ids,
        cluster_key=KEY,
        namespace=Namespace(model=MODEL, weights="w", layout=layout),
        mailbox_bytes=settings.mailbox_bytes,
    )


async def serve(apart: bool) -> None:
    """Until the standard input ends."""
    settings, queue = config(), StepQueue(asyncio.get_running_loop())
    engine = EngineApart(queue) if apart else make_engine(queue)
    engine.start()
    link = LinkSettings(replica="bench", boot=1, secret=SECRET)
    serving = served(load_card(default_model()), settings)
    front = build_front(engine, queue, serving, link, Patience())
    runner = front.runner()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    lag = Lag()
    watching = asyncio.create_task(lag.watch())
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line.startswith("reset"):
            lag.late_ms.clear()
        else:
            print(json.dumps(lag.figures()), flush=True)
    watching.cancel()
    await runner.cleanup()
    engine.close()


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--apart", action="store_true")
    uvloop.run(serve(parser.parse_args().apart))


if __name__ == "__main__":
    main()
