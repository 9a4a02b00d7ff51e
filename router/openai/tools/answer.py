"""Calls in answers: as deltas that the SDKs put together, and as parts of a whole message."""

from __future__ import annotations

import msgspec

from events.output import CLEAN_FINISHES, FINISH_STOP, CoreDelta
from router.openai.progress import Choice
from router.openai.schema import ChatRequest
from router.openai.tools.choice import Calls
from router.openai.tools.parser import CallArguments, CallBegun, Part, Said, ToolParser

_to_json = msgspec.json.Encoder().encode
FINISH_CALLS = "tool_calls"


class FunctionBody(msgspec.Struct):
    """The function of a whole call."""

    name: str
    arguments: str = ""


class CallBody(msgspec.Struct):
    """A whole call."""

    id: str
    function: FunctionBody
    type: str = "function"


class CallReader:
    """Reads one choice."""

    def __init__(self, calls: Calls) -> None:
        self._parser = ToolParser(calls.format, calls.names)

    @property
    def called(self) -> bool:
        """Whether there are calls, all of them whole."""
        return self._parser.calls > 0 and not self._parser.cut

    def read(self, delta: CoreDelta) -> tuple[str, list[Part]]:
        """What a delta says, and what it calls behind that."""
        parts = self._parser.push(delta.text)
        if delta.finish is not None and delta.finish.reason in CLEAN_FINISHES:
            parts += self._parser.end()
        said = [part.text for part in parts if isinstance(part, Said)]
        return "".join(said), [part for part in parts if not isinstance(part, Said)]

    def read_whole(self, text: str) -> tuple[str, list[CallBody]]:
        """All that a finished answer says and calls."""
        said, calls = [], []
        for part in self._parser.push(text) + self._parser.end():
            match part:
                case Said(more):
                    said.append(more)
                case CallBegun(_, call_id, name):
                    calls.append(CallBody(call_id, FunctionBody(name)))
                case CallArguments(index, more):
                    calls[index].function.arguments += more
        return "".join(said), calls


def call_readers(request: ChatRequest) -> list[CallReader] | None:
    """One for each choice; None where nothing can be called."""
    calls = request.calls
    return None if calls is None else [CallReader(calls) for _ in range(request.controls.n)]


def finish_reason(choice: Choice, reader: CallReader | None) -> str:
    """Calls are the reason only of an answer that ended by itself, behind a whole call: nobody
    should carry out one that a stop string has cut."""
    called = reader is not None and reader.called
    assert choice.finish is not None
    return FINISH_CALLS if called and choice.finish == FINISH_STOP else choice.finish


def call_members(part: Part) -> bytes:
    """The members of a delta. Id, type and name come once, with the first of a call."""
    if isinstance(part, CallBegun):
        head = b',"id":' + _to_json(part.id) + b',"type":"function","function":{"name":'
        inner = b"%d" % part.index + head + _to_json(part.name) + b',"arguments":""}'
    else:
        assert isinstance(part, CallArguments)
        inner = b'%d,"function":{"arguments":' % part.index + _to_json(part.text) + b"}"
    return b'"tool_calls":[{"index":' + inner + b"}]"
