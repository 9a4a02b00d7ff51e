"""A model whose weights stay 4-bit blocks, through the runner: the results of the same weights as
numbers, however its prompts are cut and whoever shares its batch; in float32 to the bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from queue import SimpleQueue

import pytest

from configs.model.adapter import adapter_card
from configs.model.card import ModelCard, load_card
from configs.schema import ReplicaConfig
from events.request import SamplingParams
from replica.runner.build import build_runner
from replica.runner.runner import ModelRunner
from replica.sched.plan import ChildId, ExecutionPlan, PlanId, PlanRow, RowResult, SampleSpec
from tests.fakes.adapters import write_adapter
from tests.fakes.tiny_model import write_tiny_gguf
from tests.replica.runner.driver import Driver
from tests.replica.runner.golden import NEAR_TIE

TOKENS = 12
PARAMS = SamplingParams(max_tokens=TOKENS, seed=0, temperature=0.0, logprobs=3)
PROMPTS = [[(7 * index + 11 * place) % 290 for place in range(length)]
           for index, length in enumerate((3, 40, 71, 1, 18))]  # fmt: skip


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    return load_card(write_tiny_gguf(tmp_path_factory.mktemp("q4") / "tiny.gguf", q4=True))


def runner(card: ModelCard, weights: str, dtype: str, kernel: str = "auto") -> ModelRunner:
    config = ReplicaConfig(id="r0", dtype=dtype, weights=weights, kernel=kernel, kv_blocks=128)
    return build_runner(card, config)


def answers(runner: ModelRunner, order: list[int], chunk: int) -> dict[int, list[RowResult]]:
    """By prompt, all of them side by side in this order."""
    driver = Driver(runner, chunk)
    children = {index: driver.child(PROMPTS[index], TOKENS, PARAMS) for index in order}
    driver.generate(list(children.values()), TOKENS)
    return {
        index: [replace(row, child=index) for row in child.results]
        for index, child in children.items()
    }


def test_results_are_those_of_numbers_to_the_bit(card: ModelCard) -> None:
    kept, dense = runner(card, "q4", "float32"), runner(card, "dense", "float32")
    for order, chunk in (([0, 1, 2, 3, 4], 512), ([4, 2, 0, 3, 1], 16), ([4, 2, 0, 3, 1], 33)):
        assert answers(kept, order, chunk) == answers(dense, order, chunk)


def test_in_bfloat16_they_part_at_near_ties_only(card: ModelCard) -> None:
    exact = answers(runner(card, "dense", "float32"), [0, 1, 2, 3, 4], 512)
    kept = runner(card, "q4", "bfloat16")
    for order, chunk in (([0, 1, 2, 3, 4], 512), ([4, 2, 0, 3, 1], 16), ([2], 33)):
        for index, rows in answers(kept, order, chunk).items():
            check_parting(rows, exact[index])


def check_parting(rows: list[RowResult], exact: list[RowResult]) -> None:
    for row, wanted in zip(rows, exact, strict=True):
        if row.token_id != wanted.token_id:
            (_, first), (_, second), *_ = wanted.logprob.top
            assert first - second < NEAR_TIE["bfloat16"]
            return


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neighbours_and_a_warm_prefix_change_nothing(card: ModelCard, dtype: str) -> None:
    kept = runner(card, "q4", dtype)
    together = answers(kept, [0, 1, 2, 3, 4], 512)
    for index in (1, 3):
        alone = answers(kept, [index], 512)[index]
        assert [row.token_id for row in alone] == [row.token_id for row in together[index]]
    driver = Driver(kept)
    first, again = (driver.child(PROMPTS[2], TOKENS, PARAMS) for _ in range(2))
    driver.generate([first], TOKENS)
    again.blocks = first.blocks[:4] + again.blocks[4:]
    again.computed = 4 * kept.block_tokens
    driver.generate([again], TOKENS)
    assert again.output == first.output


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_have_the_same_bits_alone_and_beside_forty_others(
    tmp_path: Path, dtype: str
) -> None:
    """Heads that the native attention takes: plain torch sums in another order in other batches."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", q4=True, heads=2, kv_heads=1)
    kept = runner(load_card(path), "q4", dtype)

    def logprobs(rows: list[RowResult]) -> list[object]:
        return [row.logprob.top for row in rows if row.logprob is not None]

    order = [0, 1, 2, 3, 4]
    driver = Driver(kept, 16)
    many = [driver.child(PROMPTS[at % 5], TOKENS, PARAMS) for at in range(40)]
    driver.generate(many, TOKENS)
    for index in order:
        alone = answers(kept, [index], 16)[index]
        for child in many[index::5]:
            assert child.output == [row.token_id for row in alone]
            assert logprobs(child.results) == logprobs(alone)


def test_adapters_of_neighbours_change_no_bit(tmp_path: Path) -> None:
    """Answers before, among and behind those with one, beside prompts that are gated apart."""
    card = load_card(write_tiny_gguf(tmp_path / "tiny.gguf", q4=True, heads=2, kv_heads=1))
    paths = {name: write_adapter(tmp_path / name, card.shape, seed=seed, rank=5 * seed)
             for seed, name in enumerate("ab", 1)}  # fmt: skip
    cards = {name: adapter_card(name, path, card.shape) for name, path in paths.items()}
    config = ReplicaConfig(id="r0", dtype="bfloat16", weights="q4", kv_blocks=128)
    kept, landed = build_runner(card, config, cards), SimpleQueue[bool]()
    assert kept.adapters is not None
    kept.adapters.attach(lambda name, loaded: landed.put(loaded))
    for name in cards:
        kept.adapters.load(name)
    assert [landed.get(timeout=60) for _ in cards] == [True, True]
    plans = count(1)

    def results(rows: list[PlanRow]) -> list[RowResult]:
        return list(kept.execute(ExecutionPlan(PlanId(next(plans)), tuple(rows))).rows)

    def row(child: int, start: int, end: int) -> PlanRow:
        tokens = tuple((7 * place + 13 * child) % 290 for place in range(start, end))
        blocks, spec = tuple(range(8 * child, 8 * child + 8)), SampleSpec(PARAMS, 0, end)
        return PlanRow(
            ChildId(child), 0, start, tokens, blocks, spec, adapter=["", "a", "b"][child % 3]
        )

    many = range(12)
    results([row(child, 0, 20) for child in many])
    mixed = [row(child, 20, 21 if child < 6 else 22 + 3 * child) for child in many]
    alone = [results([each])[0] for each in mixed]
    for some in (mixed, mixed[::-1], mixed[:7], mixed[:6]):
        assert results(some) == [alone[each.child] for each in some]


def test_plain_torch_agrees(card: ModelCard) -> None:
    native, torch = (runner(card, "q4", "float32", kernel) for kernel in ("auto", "torch"))
    one, other = answers(native, [0, 1, 2], 512), answers(torch, [0, 1, 2], 512)
    for index in one:
        tokens = ([row.token_id for row in of[index]] for of in (one, other))
        assert next(tokens) == next(tokens)


def test_an_answer_costs_no_copy_of_the_weights(tmp_path: Path) -> None:
    """What native kernels hold is as long as the file's blocks, but for whole panels."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", hidden=128, heads=4, q4=True)
    held = runner(load_card(path), "q4", "bfloat16")._model._weights
    layer = held.layers[0]
    gate_and_up = 2 * 256 * 128 // 32 * 20
    assert layer.gated._panels._packed.nbytes == gate_and_up
    assert held.head._panels is held.embedding._panels
