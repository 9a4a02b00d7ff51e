"""Batches of mixed rows against a dense float64 pass over weights with the adapter merged in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.model.adapter import MODULES, AdapterFile, held_numbers
from configs.model.shape import ModelShape
from replica.attention.base import HeadShape, PagedAttention
from replica.attention.cpu_native import NativePagedAttention
from replica.attention.torch_paged import TorchPagedAttention
from replica.lora.apply import FEW_TOKENS
from replica.lora.weights import AdapterWeights, DeltaBuilder
from replica.models.kernels import Kernels
from replica.native.library import load_library
from replica.runner.batch import PlanError, build_batch, row_order
from replica.sched.plan import ChildId, PlanRow
from tests.fakes.adapters import MergedWeights, write_adapter
from tests.replica.models.plain import CPU, plain_llama
from tests.replica.models.test_kernels import make as kernels_of
from tests.replica.models.test_llama import VARIANTS
from tests.replica.models.weights import RandomWeights, dense_logits, small_shape

KERNELS = ("torch", "native")
ADAPTERS: dict[str, dict[str, object]] = {
    "all": {"rank": 5, "seed": 1},
    "attention": {"rank": 40, "seed": 2, "modules": MODULES[:4], "use_rslora": True},
    "v and up": {"rank": 1, "seed": 3, "modules": ("self_attn.v_proj", "mlp.up_proj")},
}
BLOCK = 4


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """For products this small more of them only wait for each other."""
    torch.set_num_threads(1)


class Bench:
    """One model with all ADAPTERS in memory, and what each of them has to give."""

    def __init__(
        self,
        folder: Path,
        shape: ModelShape,
        kernels: Kernels,
        dtype: torch.dtype = torch.float32,
        attention: Callable[[HeadShape], PagedAttention] = TorchPagedAttention,
    ) -> None:
        self.shape = shape
        source = RandomWeights(shape)
        self.sources: dict[str, RandomWeights | MergedWeights] = {"": source}
        self.adapters: dict[str, AdapterWeights] = {}
        builder = DeltaBuilder(shape, kernels, dtype, CPU)
        for name, settings in ADAPTERS.items():
            file = AdapterFile(write_adapter(folder / name, shape, size=0.5, **settings), shape)
            self.sources[name] = MergedWeights(source, file)
            self.adapters[name] = builder.build(name, file)
        self.model, self.pool = plain_llama(source, shape, 64, BLOCK, kernels, dtype, attention)

    def forward(self, rows: list[PlanRow], every: bool = False) -> list[Tensor]:
        """Logits of the rows as given: of each one's last token, or of `every` token."""
        order = row_order(rows)
        batch = build_batch(
            [rows[at] for at in order],
            blocks=self.pool.blocks,
            block_tokens=BLOCK,
            context_tokens=self.shape.context_tokens,
            vocab=self.shape.vocab,
            device=CPU,
            adapters=self.adapters,
        )
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(batch, self.pool.layers, every))
        sizes = np.diff(batch.host_starts.tolist()).tolist() if every else [1] * len(rows)
        found = logits.split(sizes)
        return [found[order.index(at)] for at in range(len(rows))]

    def wanted(self, name: str, tokens: list[int]) -> Tensor:
        return dense_logits(self.sources[name], tokens)


def tokens_of(child: int, count: int) -> list[int]:
    return [(7 * place + 13 * child) % 90 for place in range(count)]


def row(child: int, name: str, start: int, end: int) -> PlanRow:
    blocks = tuple(range(8 * child, 8 * child + 8))
    return PlanRow(
        ChildId(child), 0, start, tuple(tokens_of(child, end)[start:]), blocks, None, adapter=name
    )


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_mixed_rows_equal_merged_weights(tmp_path: Path, variant: str, kernels: str) -> None:
    bench = Bench(tmp_path, VARIANTS[variant], kernels_of(kernels))
    names = ["all", "", "attention", "all", "", "v and up"]
    # Prompts of different lengths in pieces, some rows of one token: all orders of spans.
    ends = [[9, 10, 20], [1, 2, 3], [20, 21, 22], [2, 3, 4], [12, 20, 21], [7, 8, 9]]
    wanted = [bench.wanted(name, tokens_of(at, ends[at][-1])) for at, name in enumerate(names)]
    done = [0] * len(names)
    for step in range(3):
        rows = [row(at, name, done[at], ends[at][step]) for at, name in enumerate(names)]
        found = bench.forward(rows, every=step == 1)
        for at in range(len(names)):
            end = ends[at][step]
            close(found[at], wanted[at][done[at] if step == 1 else end - 1 : end])
            done[at] = end
    changed = wanted[0] - bench.wanted("", tokens_of(0, ends[0][-1]))
    assert changed.abs().max() > 0.1


@pytest.mark.parametrize("kernels", KERNELS)
def test_sizes_that_fill_no_panel(tmp_path: Path, kernels: str) -> None:
    shape = small_shape(intermediate=90, hidden=66)
    bench = Bench(tmp_path, shape, kernels_of(kernels))
    rows = [row(0, "all", 0, 9), row(1, "", 0, 4), row(2, "v and up", 0, 1)]
    found = bench.forward(rows)
    for at, name in enumerate(("all", "", "v and up")):
        close(found[at], bench.wanted(name, tokens_of(at, (9, 4, 1)[at]))[-1:])


@pytest.mark.parametrize("kernels", [*KERNELS, "native by tiles"])
def test_more_tokens_than_are_gated_together(tmp_path: Path, kernels: str) -> None:
    """Single tokens without an adapter before those with one, and prompts without one behind."""
    bench = Bench(tmp_path, small_shape(), kernels_of(kernels))
    names = ["", "all", "attention", "", "v and up", ""]
    bench.forward([row(at, names[at], 0, 8) for at in range(3)])
    spans = [(8, 9), (8, 9), (8, 9), (0, 28), (0, 25), (0, 20)]
    rows = [row(at, names[at], *span) for at, span in enumerate(spans)]
    assert sum(len(each.token_ids) for each in rows) > FEW_TOKENS
    for at, found in enumerate(bench.forward(rows)):
        close(found, bench.wanted(names[at], tokens_of(at, spans[at][1]))[-1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernels", ["native", "native by tiles"])
def test_a_row_has_the_same_bits_alone_and_beside_any_others(
    tmp_path: Path, kernels: str, dtype: torch.dtype
) -> None:
    attention = partial(NativePagedAttention, library=load_library(), tiles="tiles" in kernels)
    bench = Bench(tmp_path, small_shape(), kernels_of(kernels), dtype, attention)
    names = ["all", "", "attention", "all", "", "v and up", "attention", ""]
    ends = [9, 12, 3, 9, 30, 5, 26, 20]
    rows = [row(at, name, 0, ends[at]) for at, name in enumerate(names)]
    more = [row(at, name, ends[at], ends[at] + 1) for at, name in enumerate(names)]
    alone = [bench.forward([each])[0] for each in (*rows, *more)]
    for order in (rows, rows[::-1], rows[3:6]):
        for each, found in zip(order, bench.forward(order), strict=True):
            assert torch.equal(found, alone[each.child])
    mixed = [*more[2:5], *rows[5:], *more[:2]]
    for each, found in zip(mixed, bench.forward(mixed), strict=True):
        assert torch.equal(found, alone[each.child + len(rows) * (each.start > 0)])


def test_an_adapter_that_is_not_in_memory_is_a_broken_plan(tmp_path: Path) -> None:
    bench = Bench(tmp_path, small_shape(), kernels_of("torch"))
    with pytest.raises(PlanError, match="'other' is not in memory"):
        bench.forward([row(0, "other", 0, 3)])


@pytest.mark.parametrize("kernels", [*KERNELS, "native by tiles"])
def test_bfloat16_follows_float32(tmp_path: Path, kernels: str) -> None:
    bench = Bench(tmp_path, small_shape(), kernels_of(kernels), torch.bfloat16)
    found = bench.forward([row(0, "all", 0, 9), row(1, "", 0, 4), row(2, "attention", 0, 1)])
    for at, (name, end) in enumerate((("all", 9), ("", 4), ("attention", 1))):
        wanted = bench.wanted(name, tokens_of(at, end))[-1]
        near = torch.nn.functional.cosine_similarity(found[at][0].double(), wanted, dim=0)
        assert near > 0.995
    rank = ADAPTERS["all"]["rank"]
    assert bench.adapters["all"].bytes == 2 * held_numbers(bench.shape, rank)
