"""Constrained rows under the scheduler: a random model writes what the grammar allows, whatever the
schedule, and the same as alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from configs.model.card import ModelCard, load_card
from configs.schema import ReplicaConfig
from events.grammar import JSON_SCHEMA, REGEX, Grammar
from replica.engine.messages import ChildOutput, EngineRequest
from replica.grammar.compiler import GrammarCompiler
from replica.runner.build import build_runner
from replica.runner.runner import ModelRunner
from replica.sched.plan import ChildId
from tests.replica.engine.rig import EngineRig
from tests.replica.engine.schedules import Engine, Schedule
from tests.replica.sched.rig import chain_of, sampling, tokens_of

CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome", "Lima"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "size", "tags"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar(JSON_SCHEMA, json.dumps(CITY)),
    Grammar(REGEX, r"\d{3}-\d{4}"),
    None,
    Grammar(REGEX, "(yes|no), (maybe|never)!{2,6}"),
)


@pytest.fixture(scope="module")
def card(tiny_model: Path) -> ModelCard:
    return load_card(tiny_model)


@pytest.fixture(scope="module")
def runner(card: ModelCard) -> Iterator[ModelRunner]:
    config = ReplicaConfig(
        id="r", dtype="float32", threads=1, block_tokens=8, kv_blocks=128, kernel="torch"
    )
    made = build_runner(card, config)
    yield made
    made.close()


class Constrained:
    """Runs requests with grammars to their end."""

    def __init__(self, card: ModelCard, runner: ModelRunner) -> None:
        self.card = card
        self.runner = runner
        self.compiler = GrammarCompiler(card.tokenizer, card.eos_ids)
        vocab = range(card.tokenizer.vocab_size)
        self.blanks = {t: -100.0 for t in vocab if card.tokenizer.token_bytes(t).isspace()}

    def request(
        self, child: int, grammar: Grammar | None, output: tuple[int, ...] = (), **params: Any
    ) -> EngineRequest:
        prompt = tuple(token % 250 for token in tokens_of(child, 11))
        settings = {
            "temperature": 1.0,
            "ignore_eos": grammar is None,
            "grammar": grammar,
            "logit_bias": self.blanks,
            **params,
        }
        return EngineRequest(
            child=ChildId(child),
            prompt=prompt,
            chain=chain_of(prompt, self.runner.block_tokens),
            params=sampling(90 if grammar else 20, **settings),
            seed=child,
            eos_ids=self.card.eos_ids,
            tenant="t",
            arrival_s=float(child),
            output=output,
            grammar=None if grammar is None else self.compiler.states(grammar, [output])[0],
        )

    def run(self, engine: Engine, requests: list[EngineRequest]) -> dict[int, list[ChildOutput]]:
        found: dict[int, list[ChildOutput]] = {request.child: [] for request in requests}
        for request in requests:
            engine.scheduler.add(request)
        while engine.scheduler.runnable:
            plan = engine.scheduler.plan(1.0)
            if plan is not None:
                engine.scheduler.commit(self.runner.execute(plan))
            for output in engine.scheduler.take_outputs():
                found[output.child].append(output)
        return found

    def text(self, outputs: list[ChildOutput]) -> str:
        return self.card.tokenizer.decode(ids_of(outputs))


def ids_of(outputs: list[ChildOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def check(grammar: Grammar | None, text: str) -> None:
    if grammar is None:
        return
    if grammar.kind == REGEX:
        assert re.fullmatch(grammar.source, text)
        return
    value = json.loads(text)
    assert value["city"] in ("Oslo", "Rome", "Lima")
    assert 0 <= value["size"] <= 9999
    assert all(isinstance(tag, bool) for tag in value["tags"])


SCHEDULES = {
    "alone": Schedule(max_running=1),
    "batched": Schedule(),
    "chunked": Schedule(max_step_tokens=8),
    "preempted": Schedule(total_blocks=10, horizon_tokens=1),
}


def test_every_schedule_gives_the_same_whole_answers(card: ModelCard, runner: ModelRunner) -> None:
    those = [(number, GRAMMARS[number % len(GRAMMARS)]) for number in range(4)]
    answers: dict[str, dict[int, list[int]]] = {}
    for name, schedule in SCHEDULES.items():
        engine, constrained = Engine(runner, schedule), Constrained(card, runner)
        found = constrained.run(engine, [constrained.request(*each) for each in those])
        for number, grammar in those:
            end = found[number][-1]
            assert end.error is None
            assert end.finish == ("length" if grammar is None else "stop")
            check(grammar, constrained.text(found[number]))
        answers[name] = {child: ids_of(outputs) for child, outputs in found.items()}
        assert (engine.scheduler.lifecycle.preemptions > 0) == (name == "preempted")
    assert all(answer == answers["alone"] for answer in answers.values())


@pytest.mark.parametrize("overlap", [False, True])
def test_on_the_thread_with_and_without_overlap(card: ModelCard, overlap: bool) -> None:
    """Planned ahead or not, a mask never misses a token."""
    settings = {"dtype": "float32", "threads": 1, "kv_blocks": 128, "kernel": "torch"}
    made = build_runner(card, ReplicaConfig(id="r", block_tokens=8, **settings))
    rig = EngineRig(made, 8, overlap=overlap)
    rig.engine.start()
    constrained = Constrained(card, made)
    try:
        requests = [constrained.request(at + 1, GRAMMARS[at]) for at in range(len(GRAMMARS))]
        for request in requests:
            rig.engine.submit(request)
        for request, grammar in zip(requests, GRAMMARS, strict=True):
            end = rig.sink.end_of(request.child)
            assert end.error is None
            check(grammar, card.tokenizer.decode(rig.sink.tokens(request.child)))
    finally:
        rig.engine.close()


def test_it_goes_on_behind_what_was_put_out_elsewhere(card: ModelCard, runner: ModelRunner) -> None:
    constrained = Constrained(card, runner)
    whole = ids_of(
        constrained.run(Engine(runner, Schedule()), [constrained.request(0, GRAMMARS[0])])[0]
    )
    for cut in (1, len(whole) // 2, len(whole) - 1):
        rest = constrained.request(0, GRAMMARS[0], output=tuple(whole[:cut]))
        found = constrained.run(Engine(runner, Schedule()), [rest])
        assert whole[:cut] + ids_of(found[0]) == whole


def test_the_token_that_completes_it_belongs_to_the_answer(
    card: ModelCard, runner: ModelRunner
) -> None:
    """No end token is awaited, none is counted, and `min_tokens` can't ask for more."""
    constrained = Constrained(card, runner)
    asked = constrained.request(3, Grammar(REGEX, "a{3}"), min_tokens=9, ignore_eos=True)
    outputs = constrained.run(Engine(runner, Schedule()), [asked])[3]
    assert constrained.text(outputs) == "aaa"
    assert outputs[-1].finish == "stop"
    assert outputs[-1].stop_token is None


def test_an_open_grammar_ends_with_an_end_token(card: ModelCard, runner: ModelRunner) -> None:
    constrained = Constrained(card, runner)
    (eos,) = card.eos_ids
    asked = constrained.request(1, Grammar(REGEX, "a+"), logit_bias={eos: 50.0}, min_tokens=4)
    outputs = constrained.run(Engine(runner, Schedule()), [asked])[1]
    assert outputs[-1].stop_token == eos
    assert set(card.tokenizer.decode(ids_of(outputs)[:-1])) == {"a"}
    assert len(ids_of(outputs)) == 5


def test_a_grammar_that_fails_takes_only_its_own_row_along(
    card: ModelCard, runner: ModelRunner
) -> None:
    constrained = Constrained(card, runner)
    broken = constrained.request(0, GRAMMARS[1])
    assert broken.grammar is not None
    broken.grammar.advance([5, 6, 7])
    found = constrained.run(Engine(runner, Schedule()), [broken, constrained.request(1, None)])
    assert found[0][-1].error.code == "grammar_too_complex"
    assert found[1][-1].finish == "length"


def test_R11_what_a_request_bars_itself_is_its_own_fault(
    card: ModelCard, runner: ModelRunner
) -> None:
    """A 5xx would count against every replica that it is tried on."""
    constrained = Constrained(card, runner)
    (letter,) = card.tokenizer.encode("a")
    asked = constrained.request(0, Grammar(REGEX, "a"), bad_words=((letter,),))
    found = constrained.run(Engine(runner, Schedule()), [asked, constrained.request(1, None)])
    error = found[0][-1].error
    assert (error.status, error.code) == (400, "no_token_left")
    assert found[1][-1].finish == "length"


def test_logprobs_are_those_of_the_model_not_of_the_mask(
    card: ModelCard, runner: ModelRunner
) -> None:
    constrained = Constrained(card, runner)
    asked = constrained.request(2, Grammar(REGEX, "[0-9]{4}"), logprobs=2)
    entries = [each for output in constrained.run(Engine(runner, Schedule()), [asked])[2]
               for each in output.logprobs]  # fmt: skip
    assert len(entries) == 4
    digits = {token for digit in "0123456789" for token in card.tokenizer.encode(digit)}
    assert any(token not in digits for entry in entries for token, _ in entry.top)
