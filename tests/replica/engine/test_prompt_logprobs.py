"""Logprobs of a prompt: those of the model, however the prompt was cut, and once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.model.card import load_card
from configs.schema import ReplicaConfig
from events.output import TokenLogprob
from replica.engine.messages import EngineRequest
from replica.runner.build import build_runner
from replica.runner.runner import ModelRunner
from replica.sched.plan import ChildId
from tests.replica.engine.schedules import Engine, Schedule
from tests.replica.sched.rig import chain_of, sampling, tokens_of

PROMPT = tuple(token % 250 for token in tokens_of(5, 37))
OTHER = tuple(token % 250 for token in tokens_of(6, 30))
BLOCK_TOKENS = 8


@pytest.fixture(scope="module", params=["torch", "auto"])
def runner(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[ModelRunner]:
    config = ReplicaConfig(
        id="r",
        dtype="float32",
        threads=1,
        block_tokens=BLOCK_TOKENS,
        kv_blocks=64,
        kernel=request.param,
    )
    made = build_runner(load_card(tiny_model), config)
    yield made
    made.close()


def asked(child: int, prompt: tuple[int, ...], **fields: object) -> EngineRequest:
    params = sampling(**{"max_tokens": 6, "ignore_eos": True, **fields})
    return EngineRequest(
        child=ChildId(child),
        prompt=prompt,
        chain=chain_of(prompt, BLOCK_TOKENS),
        params=params,
        seed=0,
        eos_ids=frozenset(),
        tenant="t",
        arrival_s=float(child),
        skip_cache_read=params.prompt_logprobs is not None,
    )


def run(engine: Engine, *requests: EngineRequest) -> dict[int, list]:
    """The outputs of each child."""
    found: dict[int, list] = {request.child: [] for request in requests}
    for request in requests:
        engine.scheduler.add(request)
    while engine.scheduler.runnable:
        plan = engine.scheduler.plan(1.0)
        if plan is not None:
            engine.scheduler.commit(engine.runner.execute(plan))
        for output in engine.scheduler.take_outputs():
            assert output.error is None
            found[output.child].append(output)
    return found


def one_by_one(runner: ModelRunner, prompt: tuple[int, ...]) -> list[float]:
    """The plain way: each token forced behind what stands before it."""
    engine = Engine(runner, Schedule())
    heads = [
        asked(at, prompt[:at], max_tokens=1, logprobs=0, logit_bias={prompt[at]: 100.0})
        for at in range(1, len(prompt))
    ]
    outputs = run(engine, *heads)
    assert [outputs[at][0].token_ids for at in range(1, len(prompt))] == [(t,) for t in prompt[1:]]
    return [outputs[at][0].logprobs[0].logprob for at in range(1, len(prompt))]


def check(scores: tuple[TokenLogprob, ...], wanted: list[float]) -> None:
    assert [score.token_id for score in scores] == list(PROMPT)
    assert math.isnan(scores[0].logprob)
    assert [score.logprob for score in scores[1:]] == pytest.approx(wanted, abs=1e-3)
    for score in scores[1:]:
        assert len(score.top) == 3
        assert score.top == tuple(sorted(score.top, key=lambda pair: -pair[1]))
        assert score.logprob <= score.top[0][1] + 1e-6


def test_every_cut_tells_what_the_plain_way_tells(runner: ModelRunner) -> None:
    wanted = one_by_one(runner, PROMPT)
    plain = run(Engine(runner, Schedule()), asked(0, PROMPT))[0]
    for schedule in (
        Schedule(),
        Schedule(max_step_tokens=7),
        Schedule(max_step_tokens=16),
        Schedule(total_blocks=9, horizon_tokens=1),
    ):
        engine = Engine(runner, schedule)
        for _ in range(2):  # the second time the prompt lies in the cache, and is not read from it
            found = run(engine, asked(1, PROMPT, prompt_logprobs=3), asked(2, OTHER))
            first, *later = found[1]
            check(first.prompt_logprobs, wanted)
            assert not any(output.prompt_logprobs for output in (*later, *found[2]))
            tokens = [token for output in found[1] for token in output.token_ids]
            assert tokens == [token for output in plain for token in output.token_ids]


def test_no_alternatives_and_the_shortest_prompt(runner: ModelRunner) -> None:
    found = run(Engine(runner, Schedule()), asked(1, PROMPT[:1], prompt_logprobs=0))
    (only,) = found[1][0].prompt_logprobs
    assert (only.token_id, only.top) == (PROMPT[0], ())


def test_what_goes_on_elsewhere_has_told_them(runner: ModelRunner) -> None:
    request = asked(1, PROMPT, prompt_logprobs=3)
    going_on = EngineRequest(
        **{name: getattr(request, name) for name in EngineRequest.__slots__} | {"output": (4,)}
    )
    assert not any(o.prompt_logprobs for o in run(Engine(runner, Schedule()), going_on)[1])
