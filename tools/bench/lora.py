"""What LoRA adapters cost a decode step: rows of one batch with 0, 1 and several of them, by CPU
time beside the same batch without any, all in turn in one run.

The adapters are random ones of all seven projections, loaded from files as a replica does.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from statistics import median

import numpy as np

from configs.model.adapter import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterCard,
    adapter_card,
    module_sizes,
)
from configs.model.card import load_card
from configs.model.shape import ModelShape
from configs.schema import ReplicaConfig
from replica.runner.build import build_runner
from replica.runner.runner import ModelRunner
from tools.bench.engine.forward import DECODE_CONTEXT, Bench
from tools.fetch import default_model
from tools.flags import output_file, positive

ROWS = (1, 16)
ADAPTERS = (0, 1, 4)
BLOCK_TOKENS = 16
LOAD_S = 120.0


def write_adapter(folder: Path, shape: ModelShape, rank: int, seed: int) -> Path:
    """A random one, as PEFT saves it."""
    rng, header, data = np.random.default_rng(seed), {}, bytearray()
    for layer in range(shape.layers):
        for module, (inputs, outputs) in module_sizes(shape).items():
            for half, size in (("A", (rank, inputs)), ("B", (outputs, rank))):
                numbers = rng.standard_normal(size).astype("<f4") / inputs**0.5
                at, raw = len(data), numbers.tobytes()
                data += raw
                name = f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight"
                header[name] = {
                    "dtype": "F32",
                    "shape": size,
                    "data_offsets": (at, at + len(raw)),
                }
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    folder.mkdir()
    (folder / WEIGHTS_FILE).write_bytes(struct.pack("<Q", len(head)) + head + data)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


class LoraBench:
    """A runner with adapters in memory; decodes rows at one position, again and again."""

    def __init__(self, weights: str, threads: int, rank: int, folder: Path) -> None:
        card = load_card(default_model())
        cards: dict[str, AdapterCard] = {}
        for number in range(max(ADAPTERS)):
            name = f"a{number}"
            path = write_adapter(folder / name, card.shape, rank, number)
            cards[name] = adapter_card(name, path, card.shape)
        blocks = max(ROWS) * (DECODE_CONTEXT // BLOCK_TOKENS + 1)
        config = ReplicaConfig(id="bench", kv_blocks=blocks, weights=weights, threads=threads)
        self.runner: ModelRunner = build_runner(card, config, cards)
        self.load_ms = self._load(list(cards))
        self._bench = Bench(self.runner, card.shape.vocab)
        self._span = DECODE_CONTEXT + 1
        self._bench.fill_contexts(max(ROWS), self._span)

    def step_ms(self, rows: int, adapters: int) -> float:
        """CPU time of one step of `rows`, the rows' adapters in turn; 0: none."""
        made = [
            replace(
                self._bench.row(row, DECODE_CONTEXT, self._bench.tokens(1), self._span),
                adapter=f"a{row % adapters}" if adapters else "",
            )
            for row in range(rows)
        ]
        cpu = time.process_time()
        self._bench.execute(*made)
        return 1e3 * (time.process_time() - cpu)

    def measure(self, steps: int) -> dict[str, dict[str, float]]:
        """Medians by rows and adapters; `ratio` to the same rows without any."""
        cases = [(rows, count) for rows in ROWS for count in ADAPTERS if count <= max(rows, 1)]
        taken: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
        for step in range(steps + 2):
            for case in cases:
                taken[case].append(self.step_ms(*case))
                if step < 2:
                    taken[case].clear()
        medians = {case: median(values) for case, values in taken.items()}
        return {
            f"rows{rows}_adapters{count}": {
                "cpu_ms": found,
                "ratio": found / medians[rows, 0],
            }
            for (rows, count), found in medians.items()
        }

    def _load(self, names: list[str]) -> float:
        """Median of their loads in ms."""
        bank, landed = self.runner.adapters, SimpleQueue[tuple[str, bool]]()
        if bank is None:
            raise RuntimeError("the runner takes no adapters")
        bank.attach(lambda name, loaded: landed.put((name, loaded)))
        took = []
        for name in names:
            begun = time.perf_counter()
            bank.load(name)
            if not landed.get(timeout=LOAD_S)[1]:
                raise RuntimeError(f"'{name}' could not be loaded")
            took.append(1e3 * (time.perf_counter() - begun))
        return median(took)


def main(arguments: list[str] | None = None) -> int:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(prog="warmroute bench lora", description=__doc__)
    for name, default in (("steps", 30), ("rank", 16), ("threads", 1)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--weights", choices=("dense", "q4"), default="dense")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures here")
    flags = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        bench = LoraBench(flags.weights, flags.threads, flags.rank, Path(folder))
        found = bench.measure(flags.steps)
    bench.runner.close()
    print(f"a load takes {bench.load_ms:.0f} ms")
    for name, values in found.items():
        print(f"{name:>20}  " + "  ".join(f"{key} {value:.4g}" for key, value in values.items()))
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
