"""The runner on a tiny model: chunks, cached prefixes, mixed batches, faults of single rows."""

from __future__ import annotations

import pytest
import torch

from configs.model.card import ModelCard, load_card
from configs.schema import ReplicaConfig
from events.request import SamplingParams
from replica.runner.batch import PlanError
from replica.runner.build import build_runner
from replica.runner.runner import ModelRunner
from replica.sched.plan import NOT_FINITE, ChildId, ExecutionPlan, PlanId, PlanRow
from tests.fakes.tiny_model import write_tiny_gguf
from tests.replica.runner.driver import Child, Driver, with_seed

BLOCK = 4
KERNELS = ["auto", "torch"]


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    """Heads of 32, which the native attention takes."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return load_card(write_tiny_gguf(path, hidden=128, heads=4, kv_heads=2))


def make(card: ModelCard, kernel: str = "auto", dtype: str = "float32") -> ModelRunner:
    return build_runner(
        card,
        ReplicaConfig(id="r0", dtype=dtype, kernel=kernel, block_tokens=BLOCK, kv_blocks=96),
    )


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + 7 * index) % 250 + 3 for index in range(length)]


def alone(runner: ModelRunner, tokens: list[int], count: int = 6, chunk: int = 512) -> list[int]:
    driver = Driver(runner, chunk)
    child = driver.child(tokens, count)
    driver.generate([child], count)
    return child.output


@pytest.mark.parametrize("kernel", KERNELS)
def test_chunks_of_any_size_give_the_same_tokens(card: ModelCard, kernel: str) -> None:
    runner, tokens = make(card, kernel), prompt(21)
    whole = alone(runner, tokens)
    for chunk in (1, 2, 3, 4, 5, 8, 20, 21):
        assert alone(runner, tokens, chunk=chunk) == whole


@pytest.mark.parametrize("kernel", KERNELS)
def test_prefill_and_decode_share_a_plan(card: ModelCard, kernel: str) -> None:
    runner = make(card, kernel)
    wanted = [alone(runner, prompt(length, length)) for length in (9, 1, 30)]
    driver = Driver(runner, chunk=7)
    first = driver.child(prompt(9, 9), 6)
    driver.generate([first], 2)
    others = [driver.child(prompt(length, length), 6) for length in (1, 30)]
    driver.generate([others[1], first, others[0]], 6)
    assert [first.output, others[0].output, others[1].output] == wanted


@pytest.mark.parametrize("kernel", KERNELS)
def test_C11_a_warm_prefix_gives_the_same_tokens_at_every_cut(card: ModelCard, kernel: str) -> None:
    runner, tokens = make(card, kernel), prompt(5 * BLOCK)
    driver = Driver(runner)
    cold = driver.child(tokens, 6)
    driver.generate([cold], 6)
    for cut in range(1, len(tokens)):
        warm = driver.child(tokens, 6)
        shared = cut // BLOCK
        warm.blocks = cold.blocks[:shared] + warm.blocks[shared:]
        warm.computed = shared * BLOCK
        driver.generate([warm], 6)
        assert warm.output == cold.output
        driver.release(Child(warm.child, [], warm.blocks[shared:]))


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_C7_a_cached_prompt_computes_its_last_token_again(card: ModelCard, length: int) -> None:
    runner, tokens = make(card), prompt(length)
    driver = Driver(runner)
    cold = driver.child(tokens, 1)
    (first,) = driver.step([cold])
    cold.known, cold.computed = tokens.copy(), length - 1
    (again,) = driver.step([cold])
    assert again.token_id == first.token_id


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_middle_chunk_is_not_sampled(card: ModelCard, dtype: str) -> None:
    driver = Driver(make(card, dtype=dtype), chunk=4)
    child = driver.child(prompt(9), 1)
    results = [driver.step([child])[0] for _ in range(3)]
    assert [result.token_id is None for result in results] == [True, True, False]
    assert all(result.error is None and result.logprob is None for result in results)


def test_a_seed_gives_the_same_tokens_in_any_company(card: ModelCard) -> None:
    runner = make(card)
    params = SamplingParams(max_tokens=8, seed=11, temperature=1.3, top_p=0.95, top_k=50)
    driver = Driver(runner)
    single = driver.child(prompt(9), 8, params)
    driver.generate([single], 8)
    crowd = [driver.child(prompt(9), 8, with_seed(params, seed)) for seed in (1, 11, 2, 3)]
    driver.generate(crowd, 8)
    assert crowd[1].output == single.output
    assert len({tuple(child.output) for child in crowd}) > 1


def poison(runner: ModelRunner, block: int) -> None:
    pool = runner._pool
    assert pool is not None
    pool.layers[0].values[block].fill_(float("nan"))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_that_is_not_finite_fails_alone(card: ModelCard, kernel: str) -> None:
    runner = make(card, kernel)
    wanted = [alone(runner, prompt(9, seed)) for seed in (1, 2)]
    driver = Driver(runner)
    children = [driver.child(prompt(9, seed), 6) for seed in (1, 5, 2)]
    driver.step(children)
    poison(runner, children[1].blocks[0])
    good, bad, fine = driver.step(children)
    assert bad.error == NOT_FINITE
    assert bad.token_id is None
    assert good.error is fine.error is None
    driver.generate([children[0], children[2]], 6)
    assert [children[0].output, children[2].output] == wanted


def test_a_middle_chunk_that_is_not_finite_is_reported(card: ModelCard) -> None:
    runner = make(card)
    driver = Driver(runner, chunk=4)
    child = driver.child(prompt(12), 1)
    driver.step([child])
    poison(runner, child.blocks[0])
    (result,) = driver.step([child])
    assert result.error == NOT_FINITE


def test_a_recycled_block_does_not_leak_what_it_held(card: ModelCard) -> None:
    runner, tokens = make(card), prompt(10)
    wanted = alone(runner, tokens)
    for block in range(runner.total_blocks + 1):
        poison(runner, block)
    assert alone(runner, tokens) == wanted


def test_a_broken_plan_raises_and_the_next_one_runs(card: ModelCard) -> None:
    runner = make(card)
    wanted = alone(runner, prompt(5))
    bad = PlanRow(ChildId(1), 0, 0, (1,), (runner.total_blocks,), None)
    with pytest.raises(PlanError):
        runner.execute(ExecutionPlan(PlanId(1), (bad,)))
    assert alone(runner, prompt(5)) == wanted


def test_an_empty_plan_gives_an_empty_result(card: ModelCard) -> None:
    result = make(card).execute(ExecutionPlan(PlanId(7), ()))
    assert result.plan_id == 7
    assert result.rows == ()


def test_a_closed_runner_refuses(card: ModelCard) -> None:
    runner = make(card)
    runner.close()
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.execute(ExecutionPlan(PlanId(1), ()))


def test_threads_follow_the_settings(card: ModelCard) -> None:
    runner = make(card)
    torch.set_num_threads(2)
    alone(runner, prompt(5), count=1)
    assert torch.get_num_threads() == 1
