"""Calls read out of text: every family's way of writing them, cut anywhere, broken anywhere."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.openai.tools.formats import HERMES, LLAMA, MISTRAL, SMOLLM, ToolFormat
from router.openai.tools.parser import CallArguments, CallBegun, Part, Said, ToolParser

NAMES = frozenset(("look", "add"))
TRICKY = {
    "a": 'quote " and \\ and } ] </tool_call>',
    "b": [1, {"c": None}],
    "ü": "日本 <tool_call>",
}


def read(format_: ToolFormat, *pieces: str) -> list[Part]:
    parser = ToolParser(format_, NAMES)
    return [part for piece in pieces for part in parser.push(piece)] + parser.end()


def said(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Said))


def called(parts: list[Part]) -> list[tuple[str, str]]:
    """Name and joined arguments of each call, in order; complains about a wrong order."""
    found: list[list[str]] = []
    for part in parts:
        if isinstance(part, CallBegun):
            assert part.index == len(found)
            found.append([part.name, ""])
        elif isinstance(part, CallArguments):
            assert part.index == len(found) - 1
            found[-1][1] += part.text
    return [(name, arguments) for name, arguments in found]


def written(format_: ToolFormat, calls: list[tuple[str, str]]) -> str:
    bodies = (f'{{"name": {json.dumps(n)}, "{format_.key}": {a}}}' for n, a in calls)
    whole = format_.between.join(f"{format_.opening}{body}{format_.closing}" for body in bodies)
    return f"{format_.head}{whole}{format_.tail}"


CALLS = [
    [("look", "{}")],
    [("look", json.dumps(TRICKY, ensure_ascii=False))],
    [("look", '{"x":1}'), ("add", '{ "x" : [ 1.5e3 , true ] }'), ("look", '{"deep": {"er": {}}}')],
]
FORMATS = [HERMES, SMOLLM, LLAMA, MISTRAL]


@pytest.mark.parametrize("format_", FORMATS, ids=lambda format_: format_.name)
@pytest.mark.parametrize("calls", CALLS, ids=len)
def test_P7_calls_are_read_back_as_written(
    format_: ToolFormat, calls: list[tuple[str, str]]
) -> None:
    text = written(format_, calls)
    for parts in (read(format_, text), read(format_, *text), read(format_, text, "\n")):
        assert called(parts) == calls
        assert said(parts) == ""
    begun = [part for part in read(format_, text) if isinstance(part, CallBegun)]
    assert len({part.id for part in begun}) == len(calls)
    assert all(part.id.startswith("call_") for part in begun)


@pytest.mark.parametrize("format_", [HERMES, SMOLLM], ids=lambda format_: format_.name)
def test_text_before_between_and_behind_calls(format_: ToolFormat) -> None:
    one, two = (written(format_, [call]) for call in (("look", "{}"), ("add", '{"x": 1}')))
    parts = read(format_, *f"Let me see.\n\n{one}\nAnd so:\n{two} Done <b>.")
    assert called(parts) == [("look", "{}"), ("add", '{"x": 1}')]
    assert said(parts) == "Let me see.\nAnd so: Done <b>."


PLAIN = [
    "", " ", "a < b", "<tool", "no <tool_calls here", "[1, 2]", '{"city": "Oslo"}', "{", "x {}",
    '{"name": "unknown", "parameters": {}}', "[x", "  two blanks  ", "</tool_call>",
]  # fmt: skip


@pytest.mark.parametrize("format_", [LLAMA, MISTRAL, HERMES], ids=lambda format_: format_.name)
@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_call_is_text(format_: ToolFormat, text: str) -> None:
    for parts in (read(format_, text), read(format_, *text)):
        assert said(parts) == text
        assert called(parts) == []


@pytest.mark.parametrize(
    "text",
    ["<tool_call>\nnonsense\n</tool_call>", "<tool_call></tool_call>", '<tool_call>{"x": 1}',
     '<tool_call>{"name": 5}', '<tool_call>{"na', "<tool_call>\n[", '<tool_call>{"arguments": {}}'],
)  # fmt: skip
def test_a_marker_without_a_call_is_text(text: str) -> None:
    for parts in (read(HERMES, text), read(HERMES, *text)):
        assert said(parts) == text
        assert called(parts) == []


def test_a_call_that_breaks_off_keeps_what_was_streamed() -> None:
    text = written(HERMES, [("look", json.dumps(TRICKY))])
    start = text.index("{", text.index("arguments"))
    for cut in range(start + 1, len(text) - len("}\n</tool_call>")):
        parts = read(HERMES, text[:cut])
        assert called(parts) == [("look", text[start:cut])]
        assert said(parts) == ""


def test_the_arguments_may_come_first_or_as_a_string_or_not_at_all() -> None:
    assert called(
        read(HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "look"}</tool_call>')
    ) == [("look", '{"x": 1}')]
    assert called(read(HERMES, r'<tool_call>{"name": "look", "arguments": "{\"x\": 1}"}')) == [
        ("look", '{"x": 1}')
    ]
    assert called(read(LLAMA, '{"name": "look"}')) == [("look", "{}")]
    assert called(read(LLAMA, '{"type": "function", "name": "look", "parameters": {}}')) == [
        ("look", "{}")
    ]


def test_arguments_are_streamed_as_they_come() -> None:
    parser = ToolParser(HERMES, NAMES)
    parser.push('<tool_call>\n{"name": "look", "arguments": {"x')
    assert parser.push('": 12') == [CallArguments(0, '": 12')]
    assert parser.push("34}") == [CallArguments(0, "34}")]
    assert parser.push("}\n</tool_call>") == []


WORDS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "\n", " ", "{", "}", "[", "]", '"name"', ": ", '"look"', ",",
     '"arguments"', "<tool", "text", '\\"', '{"name": "look", "arguments": {"a": 1}}', "<", ";"]
)  # fmt: skip


@given(st.lists(WORDS, max_size=14), st.sampled_from(FORMATS), st.data())
def test_any_cut_gives_the_same_parts(words: list[str], format_: ToolFormat, data) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    whole, cut = read(format_, text), read(format_, *pieces)
    assert (said(cut), called(cut)) == (said(whole), called(whole))
