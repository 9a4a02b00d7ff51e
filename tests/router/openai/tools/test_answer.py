"""When an answer counts as one of calls, as deltas and as a whole."""

from __future__ import annotations

import pytest

from events.output import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP, CoreDelta, CoreFinish, Usage
from router.openai.progress import Choice
from router.openai.tools.answer import FINISH_CALLS, CallReader, finish_reason
from router.openai.tools.choice import Calls
from router.openai.tools.formats import HERMES

WHOLE = '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>'
BEGUN = WHOLE[: WHOLE.index("1}")]


def delta(text: str, finish: str | None = None) -> CoreDelta:
    ended = None if finish is None else CoreFinish(reason=finish)
    return CoreDelta("r", 1, 0, text, (), (), Usage(1, 0, 1), ended)


@pytest.mark.parametrize(
    ("text", "finish", "told"),
    [
        (WHOLE, FINISH_STOP, FINISH_CALLS),
        (WHOLE + WHOLE, FINISH_STOP, FINISH_CALLS),
        (WHOLE, FINISH_LENGTH, FINISH_LENGTH),
        (BEGUN, FINISH_STOP, FINISH_STOP),
        (WHOLE + BEGUN, FINISH_STOP, FINISH_STOP),
        (BEGUN, FINISH_LENGTH, FINISH_LENGTH),
        ("no call", FINISH_STOP, FINISH_STOP),
    ],
)
def test_only_whole_calls_of_an_answer_that_ended_by_itself_are_the_reason(
    text: str, finish: str, told: str
) -> None:
    streamed, whole = (CallReader(Calls(HERMES, frozenset(("look",)))) for _ in range(2))
    for char in text:
        streamed.read(delta(char))
    streamed.read(delta("", finish))
    whole.read_whole(text)
    for reader in (streamed, whole):
        assert finish_reason(Choice(0, finish=finish), reader) == told


def test_nothing_is_called_where_nothing_can_be() -> None:
    assert finish_reason(Choice(0, finish=FINISH_STOP), None) == FINISH_STOP


def test_text_that_may_still_begin_a_call_is_said_at_a_clean_end_alone() -> None:
    begin = WHOLE[:6]
    clean, broken = (CallReader(Calls(HERMES, frozenset(("look",)))) for _ in range(2))
    assert clean.read(delta(begin)) == ("", [])
    assert clean.read(delta("", FINISH_STOP)) == (begin, [])
    broken.read(delta(begin))
    assert broken.read(delta("", FINISH_ABORT)) == ("", [])
