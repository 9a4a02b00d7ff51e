"""The sampling chain: greedy, each truncation, each edit, log-probabilities, isolation of rows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from events.request import SamplingParams
from replica.sampling import logits as logits_module
from replica.sampling.logits import draw, sample
from replica.sampling.truncate import _nucleus_floor as nucleus_floor
from replica.sampling.truncate import distribution
from replica.sched.plan import NOT_FINITE, NOTHING_LEFT, SampleSpec

DRAWS = 4000


def spec(*, seed: int = 0, position: int = 0, **fields: Any) -> SampleSpec:
    histories = {
        name: fields.pop(name)
        for name in ("prompt_ids", "output_ids", "suppress_ids")
        if name in fields
    }
    params = SamplingParams(max_tokens=1, seed=seed, **fields)
    return SampleSpec(params=params, seed=seed, position=position, **histories)


def frequencies(logits: list[float], **fields: Any) -> list[float]:
    """How often each id is drawn over many positions."""
    rows = torch.tensor([logits] * DRAWS)
    specs = [spec(position=position, **fields) for position in range(DRAWS)]
    counts = Counter(row.token_id for row in sample(rows, specs))
    return [counts[token] / DRAWS for token in range(len(logits))]


def logs(*probabilities: float) -> list[float]:
    return [math.log(each) for each in probabilities]


def near(found: list[float], wanted: list[float]) -> None:
    assert [each for each, target in zip(found, wanted, strict=True) if target == 0.0 < each] == []
    assert found == pytest.approx(wanted, abs=0.035)  # over four standard errors


def test_greedy_takes_the_first_of_the_best() -> None:
    rows = torch.tensor([[1.0, 5.0, 5.0, 2.0], [9.0, 0.0, 9.5, -1.0]])
    found = sample(rows, [spec(temperature=0.0), spec(temperature=0.0)])
    assert [row.token_id for row in found] == [1, 2]


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-46, 1e-9])
def test_a_temperature_of_nearly_zero_is_greedy(temperature: float) -> None:
    """A client may ask for it: an id beyond the vocabulary would fail the whole batch."""
    rows = torch.tensor([[1.0, 5.0, 4.0, 2.0], [9.0, 0.0, 9.5, -1.0]])
    found = sample(rows, [spec(temperature=temperature, logprobs=1), spec(temperature=0.0)])
    assert [row.token_id for row in found] == [1, 2]


def test_temperature_one_draws_the_model_s_own_distribution() -> None:
    near(frequencies(logs(0.5, 0.25, 0.15, 0.1)), [0.5, 0.25, 0.15, 0.1])


def test_temperature_sharpens_and_flattens() -> None:
    square = [0.5**2, 0.3**2, 0.2**2]
    near(frequencies(logs(0.5, 0.3, 0.2), temperature=0.5), [x / sum(square) for x in square])
    root = [0.5**0.5, 0.3**0.5, 0.2**0.5]
    near(frequencies(logs(0.5, 0.3, 0.2), temperature=2.0), [x / sum(root) for x in root])


def test_a_tiny_temperature_is_greedy_and_overflows_nothing() -> None:
    assert frequencies([300.0, 301.0, -400.0], temperature=1e-30) == [0.0, 1.0, 0.0]


def test_top_k_keeps_k() -> None:
    near(frequencies(logs(0.1, 0.4, 0.2, 0.3), top_k=2), [0, 4 / 7, 0, 3 / 7])
    near(frequencies(logs(0.1, 0.4, 0.2, 0.3), top_k=9), [0.1, 0.4, 0.2, 0.3])


def test_top_p_keeps_up_to_the_id_that_reaches_it() -> None:
    near(frequencies(logs(0.1, 0.4, 0.2, 0.3), top_p=0.6), [0, 4 / 7, 0, 3 / 7])
    near(frequencies(logs(0.1, 0.4, 0.2, 0.3), top_p=0.71), [0, 4 / 9, 2 / 9, 3 / 9])
    near(frequencies(logs(0.1, 0.4, 0.2, 0.3), top_p=1e-9), [0, 1, 0, 0])


def test_min_p_is_relative_to_the_best() -> None:
    near(frequencies(logs(0.05, 0.5, 0.25, 0.2), min_p=0.45), [0, 2 / 3, 1 / 3, 0])


def test_min_p_sees_what_the_temperature_has_made() -> None:
    """0.2 is less than half of 0.5, but its root is more than half of the other's."""
    root = [0.5**0.5, 0.2**0.5]
    wanted = [root[0] / sum(root), root[1] / sum(root), 0.0]
    near(frequencies(logs(0.5, 0.2, 0.05), min_p=0.5, temperature=2.0), wanted)


def test_bias_comes_before_penalties() -> None:
    """3 - 2 is halved to 0.5, which beats 0; the other way round it would be 1.5 - 2."""
    found = chosen([0.0, 3.0, 0.0], logit_bias={1: -2.0}, output_ids=(1,), repetition_penalty=2.0)
    assert found == 1


def test_truncations_apply_in_order() -> None:
    """top-p counts what top-k left: 0.4 and 0.3 become 4/7 and 3/7, and 0.5 needs only one."""
    near(frequencies(logs(0.1, 0.4, 0.2, 0.3), top_k=2, top_p=0.5), [0, 1, 0, 0])


def test_top_p_that_is_reached_exactly_needs_no_more() -> None:
    weights = torch.tensor([[0.5, 0.125, 0.25, 0.125]])
    for top_p, least in ((0.5, 0.5), (0.75, 0.25), (0.7501, 0.125)):
        assert nucleus_floor(weights, torch.tensor([[top_p]], dtype=torch.float64)) == least


def test_top_p_looks_as_far_as_it_must() -> None:
    flat = torch.zeros(1, 40_000)
    weights = distribution(flat, [SamplingParams(max_tokens=1, seed=0, top_p=0.5)])
    assert int((weights > 0).sum()) == 40_000  # all tie
    slope = torch.linspace(0.0, 1e-3, 40_000).unsqueeze(0)
    weights = distribution(slope, [SamplingParams(max_tokens=1, seed=0, top_p=0.5)])
    assert int((weights > 0).sum()) == pytest.approx(20_000, rel=0.01)
    assert bool(weights[0, -1] > 0)


def chosen(logits: list[float], **fields: Any) -> int | None:
    (row,) = sample(torch.tensor([logits]), [spec(temperature=0.0, **fields)])
    return row.token_id


def test_suppressed_ids_cannot_be_chosen() -> None:
    assert chosen([1.0, 3.0, 2.0], suppress_ids=(1,)) == 2
    assert chosen([1.0, 3.0, 2.0], suppress_ids=(1,), logit_bias={1: 100.0}) == 2
    assert chosen([1.0, 3.0, 2.0], suppress_ids=(1, 77)) == 2


def test_a_bad_word_cannot_be_completed() -> None:
    words = ((1,), (0, 0, 2))
    assert chosen([1.0, 3.0, 2.0], bad_words=words) == 2
    assert chosen([1.0, 3.0, 2.0], bad_words=words, output_ids=(5, 0, 0)) == 0
    assert chosen([1.0, 3.0, 2.0], bad_words=words, output_ids=(0, 0, 5)) == 2
    assert chosen([1.0, 3.0, 2.0], bad_words=words, output_ids=(0,), prompt_ids=(0,)) == 2
    assert chosen([1.0, 3.0, 2.0], bad_words=words, logit_bias={1: 100.0}) == 2
    assert chosen([1.0, 3.0, 2.0], bad_words=((1, 1, 1, 1),), output_ids=(1, 1)) == 1


def test_bias_is_added() -> None:
    assert chosen([1.0, 3.0, 2.0], logit_bias={0: 2.5}) == 0
    assert chosen([1.0, 3.0, 2.0], logit_bias={1: -100.0, 99: 5.0}) == 2


def test_presence_counts_once_and_frequency_each_time() -> None:
    made = (1, 1, 1, 2)
    assert chosen([1.0, 3.0, 2.5], output_ids=made, presence_penalty=1.0) == 1
    assert chosen([1.0, 3.0, 2.5], output_ids=made, frequency_penalty=0.3) == 2
    assert chosen([1.0, 3.0, 2.5], output_ids=(), frequency_penalty=2.0, prompt_ids=(1,)) == 1
    assert chosen([1.0, 3.0, 2.5], output_ids=made, presence_penalty=-1.0) == 1


def test_repetition_shrinks_what_prompt_or_output_held() -> None:
    assert chosen([1.0, 3.0, 2.0], prompt_ids=(1,), repetition_penalty=2.0) == 2
    assert chosen([1.0, 3.0, 2.0], output_ids=(1,), repetition_penalty=2.0) == 2
    assert chosen([-1.0, -3.0, -1.5], prompt_ids=(0,), repetition_penalty=2.0) == 2


def test_logprobs_are_raw_and_name_the_best() -> None:
    logits = logs(0.1, 0.6, 0.3)
    row, plain = sample(
        torch.tensor([logits, logits]),
        [
            spec(temperature=0.0, logprobs=2, logit_bias={0: 50.0}),
            spec(temperature=0.0),
        ],
    )
    assert plain.logprob is None
    assert row.token_id == row.logprob.token_id == 0
    assert row.logprob.logprob == pytest.approx(math.log(0.1), abs=1e-5)
    assert [token for token, _ in row.logprob.top] == [1, 2]
    assert [value for _, value in row.logprob.top] == pytest.approx(logs(0.6, 0.3), abs=1e-5)


class Only:
    """A grammar that allows one id."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def fill(self, mask: Any) -> None:
        mask[self.token_id // 32] |= 1 << self.token_id % 32


def test_logprobs_are_raw_whatever_a_grammar_allows() -> None:
    rows = torch.tensor([logs(0.5, 0.3, 0.2)] * 2)
    plain = spec(temperature=0.0, logprobs=1)
    held, free = sample(rows, [replace(plain, grammar=Only(2)), plain])
    assert (held.token_id, free.token_id) == (2, 0)
    assert held.logprob is not None
    assert held.logprob.logprob == pytest.approx(math.log(0.2))
    assert held.logprob.top[0] == (0, pytest.approx(math.log(0.5)))


def test_min_p_of_one_keeps_the_best_and_its_equals() -> None:
    near(frequencies([2.0, 2.0, 1.9], min_p=1.0), [0.5, 0.5, 0.0])


def test_zero_alternatives_are_not_no_logprobs() -> None:
    (row,) = sample(torch.tensor([[0.0, 1.0]]), [spec(temperature=0.0, logprobs=0)])
    assert row.logprob is not None
    assert row.logprob.top == ()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_fails_alone(bad: float, temperature: float) -> None:
    rows = torch.tensor([[0.0, 9.0, 1.0], [0.0, bad, 1.0], [8.0, 0.0, 1.0]])
    found = sample(rows, [spec(temperature=temperature, logprobs=1, top_k=1)] * 3)
    assert [row.token_id for row in found] == [1, None, 0]
    assert [row.error for row in found] == [None, NOT_FINITE, None]


def test_nothing_left_is_an_error_of_the_row() -> None:
    everything = spec(suppress_ids=(0, 1))
    found = sample(torch.zeros(2, 2), [everything, spec(temperature=0.0)])
    assert [row.error for row in found] == [NOTHING_LEFT, None]


def test_an_id_beyond_the_vocabulary_fails_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever makes the draw go wrong: the neighbours go on."""
    plain = logits_module.draw
    monkeypatch.setattr(
        logits_module,
        "draw",
        lambda weights, numbers: plain(weights, numbers).index_fill(0, torch.tensor([1]), 3),
    )
    found = sample(torch.zeros(3, 3), [spec(logprobs=1) for _ in range(3)])
    assert [row.error for row in found] == [None, NOTHING_LEFT, None]
    assert all(row.token_id in range(3) for row in (found[0], found[2]))


def test_the_draw_never_lands_on_weight_zero() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0]] * 3)
    numbers = torch.tensor([0.0, 0.25, 1.0 - 2.0**-53], dtype=torch.float64)
    assert draw(weights, numbers).tolist() == [1, 3, 3]


SPECS = st.builds(
    spec,
    seed=st.integers(-(2**63), 2**64),
    position=st.integers(0, 9000),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 5, 40]),
    min_p=st.sampled_from([0.0, 0.05]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([{}, {3: 4.0, 50: -2.0}]),
    logprobs=st.sampled_from([None, 0, 3]),
    prompt_ids=st.just((1, 2, 3, 3)),
    output_ids=st.just((5, 5, 60)),
    suppress_ids=st.sampled_from([(), (2, 7)]),
    bad_words=st.sampled_from([(), ((9,), (60, 11))]),
)


def random_logits(rows: int) -> Tensor:
    return torch.randn(rows, 3000, generator=torch.Generator().manual_seed(rows)) * 3


@settings(max_examples=40, deadline=None)
@given(st.lists(SPECS, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_row_does_not_depend_on_its_neighbours(specs: list[SampleSpec], random: Any) -> None:
    logits = random_logits(len(specs))
    together = sample(logits.clone(), specs)
    order = list(range(len(specs)))
    random.shuffle(order)
    shuffled = sample(logits[order].clone(), [specs[index] for index in order])
    for place, index in enumerate(order):
        (alone,) = sample(logits[index : index + 1].clone(), [specs[index]])
        assert together[index] == shuffled[place] == alone
