"""Grammars: what is refused and how, what may come next, where it ends."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema_rs import validator_for

from configs.model.card import load_card
from configs.model.tokenizer import Tokenizer
from events import finite
from events.errors import UserError
from events.finite import can_end
from events.grammar import JSON_SCHEMA, LARK, REGEX, Grammar
from replica.grammar import compiler as module
from replica.grammar import taster
from replica.grammar.compiler import GrammarCompiler
from replica.grammar.state import GrammarState

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_card(tiny_model).tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, {2})


def schema(value: Any) -> Grammar:
    return Grammar(JSON_SCHEMA, json.dumps(value))


def state_of(compiler: GrammarCompiler, grammar: Grammar) -> GrammarState:
    (state,) = compiler.states(grammar, [()])
    return state


def allowed(state: GrammarState, vocab: int) -> set[int]:
    words = np.zeros(-(-vocab // 32), np.int32)
    state.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab]
    return set(np.flatnonzero(bits).tolist())


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    state = state_of(compiler, grammar)
    return state.advance(tokenizer.encode(text)) and (
        state.finished or 2 in allowed(state, tokenizer.vocab_size)
    )


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (schema({"type": "object", "properties": {"name": "string"}}), "neither an object"),
        (schema({"type": "object", "properties": [1]}), "wrong type"),
        (schema({"type": "objekt"}), "'type'"),
        (schema({"$ref": "#"}), "requires itself"),
        (schema(NODE), "requires itself"),
        (schema({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}), "itse"),
        (schema({"type": "array", "minItems": 1, "items": {"$ref": "#"}}), "requires itself"),
        (schema({"$ref": "#/$defs/none"}), "points nowhere"),
        (schema({"$ref": "http://127.0.0.1/x"}), "outside of the document"),
        (schema({"not": {"type": "string"}}), "'not'"),
        (schema({"type": "array", "uniqueItems": True}), "'uniqueItems'"),
        (schema({"type": "string", "pattern": "(["}), "regular expression"),
        (schema({"type": "string", "format": "secret"}), "'format'"),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "nothing can satisfy"),
        (schema({"x-guidance": {"lenient": True}, "not": {}}), "'not'"),
        (schema([1]), "not a JSON schema"),
        (Grammar(JSON_SCHEMA, "{"), "not a JSON schema"),
        (Grammar(JSON_SCHEMA, '{"maximum": 1' + "0" * 400 + "}"), "a number in it is too large"),
        (Grammar(JSON_SCHEMA, '{"const": 1e999}'), "a number in it is too large"),
        (schema({"$ref": f"#/$defs/{'9' * 5000}", "$defs": [True]}), "can't be compiled"),
        (Grammar(JSON_SCHEMA, '{"items":' * 65 + "{}" + "}" * 65), "nested more than 64 levels"),
        (Grammar(JSON_SCHEMA, '{"items":' * 9_000 + "{}" + "}" * 9_000), "too complex"),
        (Grammar(REGEX, "(secret"), "regular expression"),
        (Grammar(REGEX, r"(?=secret)b"), "regular expression"),
        (Grammar(REGEX, r"(secret)\1"), "regular expression"),
        (Grammar(REGEX, ""), "no answer"),
        (Grammar(LARK, "start: nowhere"), "can't be compiled"),
        (Grammar(LARK, 'root ::= "a" ('), "can't be compiled"),
        (Grammar(LARK, "root ::= nowhere"), "can't be compiled"),
        (Grammar(LARK, "(" * 100_000), "can't be compiled"),
        (Grammar("poem", "x"), "not known"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_P12_what_cannot_be_enforced_is_refused_by_name(
    compiler: GrammarCompiler, grammar: Grammar, says: str
) -> None:
    with pytest.raises(UserError) as refused:
        compiler.states(grammar, [()])
    error = refused.value.error
    assert (error.status, error.code, error.param) == (400, "invalid_value", "response_format")
    assert says in error.message
    assert "secret" not in error.message
    assert "\n" not in error.message


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": ["array", "null"], "minItems": 1}}},
        {"properties": {"x": {"$ref": "#"}}, "required": ["x"]},
        True,
    ],
)
def test_recursion_that_can_end_is_allowed(value: Any) -> None:
    assert can_end(value)


@pytest.mark.parametrize("step", [1, -1])
def test_a_chain_of_references_is_followed_from_either_end(step: int) -> None:
    names = [f"d{at}" for at in range(500)][::step]
    links = {name: {"$ref": f"#/$defs/{to}"} for name, to in pairwise(names)}
    endless = {"$ref": f"#/$defs/{names[-1]}"}
    root = {"$ref": f"#/$defs/{names[0]}"}
    assert can_end({"$defs": {**links, names[-1]: {}}, **root})
    assert not can_end({"$defs": {**links, names[-1]: endless}, **root})


def test_what_takes_too_long_to_judge_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain in disorder needs a round for each few of its links."""
    looks, judge = 0, finite._ends

    def count(*given: Any) -> bool:
        nonlocal looks
        looks += 1
        return judge(*given)

    monkeypatch.setattr(finite, "_ends", count)
    size, stride = 10_000, 7_919
    links = {f"d{at}": {"$ref": f"#/$defs/d{(at + stride) % size}"} for at in range(size)}
    assert can_end({"$defs": {**links, "d1": {}}, "$ref": "#/$defs/d0"})
    assert looks <= 2 * finite.MAX_VISITS


def chain_of_refs(links: int) -> Grammar:
    definitions = {f"d{at}": {"type": "array", "items": {"$ref": f"#/$defs/d{at + 1}"}}
                   for at in range(links)}  # fmt: skip
    return schema({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{links}": {"enum": [1]}}})


def rules(links: int) -> Grammar:
    named = [f'r{at}: "a" r{at + 1}' for at in range(links)]
    return Grammar(LARK, "\n".join(["start: r0", *named, f'r{links}: "b"']))


PATTERNS = [{"pattern": f"(.*a.{{{at}}}b.*)"} for at in range(5, 100)]


@pytest.mark.parametrize(
    "grammar",
    [
        chain_of_refs(4_000),
        rules(8_000),
        pytest.param(schema({"type": "string", "allOf": PATTERNS}), marks=pytest.mark.slow),
    ],
    ids=["references", "rules", "patterns"],
)
def test_P12_what_would_end_the_process_is_refused(
    compiler: GrammarCompiler, grammar: Grammar
) -> None:
    with pytest.raises(UserError, match="too large or nested too deeply") as refused:
        compiler.states(grammar, [()])
    assert refused.value.error.status == 400


def test_a_large_schema_that_is_flat_is_taken(compiler: GrammarCompiler) -> None:
    properties = {f"name_{at}": {"type": "integer"} for at in range(600)}
    large = schema({"type": "object", "properties": properties, "required": ["name_1"]})
    assert not taster.is_harmless(large)
    assert compiler.states(large, [()])


def test_mutual_recursion_is_seen_through() -> None:
    one = {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]}
    two = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}
    assert not can_end({"$ref": "#/$defs/a", "$defs": {"a": one, "b": two}})
    two["required"] = []
    assert can_end({"$ref": "#/$defs/a", "$defs": {"a": one, "b": two}})


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"name":"Ann","age":3}', True),
        ('{"name": "Ann", "age": 3}', True),
        ('{\n  "name": "Ann",\n  "age": -31\n}', True),
        ('{"name": "Annabel", "age": 3}', False),
        ('{"name": "Ann"}', False),
        ('{"name": "Ann", "age": 3, "x": 1}', False),
        ('{"age": 3, "name": "Ann"}', False),
        ('{  "name": "Ann", "age": 3}', False),
        ("Ann is 3", False),
    ],
)
def test_a_schema_is_enforced(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, fits: bool
) -> None:
    assert accepts(compiler, tokenizer, schema(PERSON), text) is fits
    if fits:
        assert validator_for(PERSON).is_valid(json.loads(text))


def test_it_is_finished_where_nothing_can_follow(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = state_of(compiler, Grammar(REGEX, "(yes|no)"))
    assert not state.finished
    assert state.advance(tokenizer.encode("yes"))
    assert state.finished
    open_end = state_of(compiler, Grammar(REGEX, "[0-9]+"))
    assert open_end.advance(tokenizer.encode("12"))
    assert not open_end.finished
    assert 2 in allowed(open_end, tokenizer.vocab_size)


def test_a_token_that_does_not_fit_fails_it_for_good(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    state = state_of(compiler, Grammar(REGEX, "(yes|no)"))
    assert not state.advance(tokenizer.encode("maybe"))
    assert state.failed
    assert not state.finished
    assert allowed(state, tokenizer.vocab_size) == set()


def test_a_special_token_is_not_the_text_that_spells_it(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    free = state_of(compiler, Grammar(REGEX, r"(.|\n)*"))
    assert not allowed(free, tokenizer.vocab_size) & (tokenizer.special_ids - {2})
    state = state_of(compiler, Grammar(REGEX, r"<\|im_end\|>x"))
    assert state.advance(tokenizer.encode("<|im_end|>x"))


def test_states_go_on_behind_what_was_put_out(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = Grammar(REGEX, "[ab]{4}c")
    one, two = compiler.states(grammar, [tokenizer.encode("ab"), ()])
    fresh = state_of(compiler, grammar)
    assert fresh.advance(tokenizer.encode("ab"))
    assert allowed(one, tokenizer.vocab_size) == allowed(fresh, tokenizer.vocab_size)
    assert one.advance(tokenizer.encode("abc"))
    assert one.finished
    assert not two.finished
    for beyond in ("abx", "ababc"):
        with pytest.raises(UserError) as refused:
            compiler.states(grammar, [tokenizer.encode(beyond)])
        assert refused.value.error.param == "progress"


def test_the_cache_is_bounded_and_apart_by_scope(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(tokenizer, {2})
    compiled: list[str] = []
    plain = compiler._compile
    monkeypatch.setattr(
        compiler, "_compile", lambda grammar: compiled.append(grammar.source) or plain(grammar)
    )
    grammar = Grammar(REGEX, "a+")
    for scope in (b"a", b"a", b"b", b"a"):
        compiler.states(grammar, [()], scope)
    assert len(compiled) == 2
    monkeypatch.setattr(module, "CACHED_GRAMMARS", 3)
    for number in range(5):
        compiler.states(Grammar(REGEX, f"a{{{number + 1}}}"), [()], b"a")
    assert len(compiler._cache) == 3
    assert compiler._cached_bytes == sum(len(source) for _, _, source in compiler._cache)
