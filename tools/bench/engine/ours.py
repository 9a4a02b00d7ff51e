"""Our side of the contest: `python -m tools.bench.engine.ours`, spoken to like a peer."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import uvloop

from configs.model.card import load_card
from configs.schema import ReplicaConfig
from replica.runner.build import build_runner, dtype_name
from tools.bench.engine import forward as pass_alone
from tools.bench.engine.peers.talk import serve
from tools.bench.engine.rig import Rig

STEP_TOKENS = 512
BLOCK_TOKENS = 16


class Ours:
    """One runner; an engine with its front for each measurement."""

    def load(
        self,
        model: str,
        dtype: str,
        threads: int,
        rows: int,
        most_tokens: int,
        kv_tokens: int,
        forward: bool,
        settings: dict[str, Any],
        **_: Any,
    ) -> dict[str, object]:
        """`settings`: of ReplicaConfig, over those that the contest needs."""
        self._card = load_card(Path(model))
        if forward:
            kv_tokens = max(kv_tokens, pass_alone.KV_TOKENS)
        defaults: dict[str, Any] = {
            "id": "bench",
            "dtype": dtype,
            "threads": threads,
            "kv_blocks": kv_tokens // BLOCK_TOKENS,
            "max_running": rows,
            "max_step_tokens": STEP_TOKENS,
            "context_tokens": most_tokens,
            "itl_target_ms": 0.0,
        }
        self._config = ReplicaConfig(**defaults | settings)
        self._runner = build_runner(self._card, self._config)
        self._random = random.Random(0)
        self._loop = uvloop.new_event_loop()
        held = {"dense": "", "q4": ", 4-bit weights"}[self._config.weights]
        return {"version": "this checkout", "precision": dtype_name(self._config) + held}

    def prefill(self, tokens: int) -> dict[str, float]:
        """From the request's frame to that of its only token."""
        return self._loop.run_until_complete(self._prefill(tokens))

    def decode(self, rows: int, context: int, steps: int) -> dict[str, float]:
        """`overhead`: the share of the CPU time that is not the runner's."""
        return self._loop.run_until_complete(self._decode(rows, context, steps))

    def forward(self, rounds: int) -> dict[str, object]:
        """See tools.bench.engine.forward."""
        return pass_alone.measure(self._runner, self._card.shape, dtype_name(self._config), rounds)

    async def _prefill(self, tokens: int) -> dict[str, float]:
        rig = Rig(self._card, self._config, self._runner)
        begun_s = asyncio.get_running_loop().time()
        rig.submit(self._prompt(tokens), 1)
        await rig.until(lambda: bool(rig.marks))
        seconds = asyncio.get_running_loop().time() - begun_s
        await rig.close()
        return {"seconds": seconds}

    async def _decode(self, rows: int, context: int, steps: int) -> dict[str, float]:
        rig = Rig(self._card, self._config, self._runner)
        # Those that come first write more while the last prompts are computed.
        answer = steps + 8 + 2 * rows * context // STEP_TOKENS
        for _ in range(rows):
            rig.submit(self._prompt(context), answer)
        await rig.until(lambda: len(rig.full(rows)) > steps)
        first, last = rig.full(rows)[0], rig.full(rows)[steps]
        await rig.close()
        cpu_s = last.cpu_s - first.cpu_s
        return {
            "seconds": last.now_s - first.now_s,
            "overhead": 1.0 - (last.runner_cpu_s - first.runner_cpu_s) / cpu_s,
        }

    def _prompt(self, tokens: int) -> list[int]:
        vocab = self._card.shape.vocab
        return [self._random.randrange(100, vocab - 100) for _ in range(tokens)]


if __name__ == "__main__":
    serve(Ours())
