"""Answers of /v1/chat/completions: a stream of chunks, or one body."""

from __future__ import annotations

import msgspec

from events.output import CoreDelta
from router.openai.logprobs import TokenTexts
from router.openai.progress import Choice, Progress
from router.openai.schema import ChatRequest
from router.openai.stream import EventStream, ReplyHead, to_json
from router.openai.tools.answer import (
    CallBody,
    CallReader,
    call_members,
    call_readers,
    finish_reason,
)
from router.openai.tools.parser import Part
from router.openai.usage import UsageBody


class _ChunkParts:
    """The constant pieces of every chunk of one stream; a chunk is their concatenation."""

    def __init__(self, head: ReplyHead, include_usage: bool, logprobs: bool) -> None:
        self.start = (
            b'data: {"id":' + to_json(head.id) + b',"object":"chat.completion.chunk","created":'
            b"%d" % head.created + b',"model":' + to_json(head.model) + b',"service_tier":"default"'
            b',"system_fingerprint":' + to_json(head.fingerprint) + b',"choices":['
        )
        self.logprobs = b',"logprobs":null' if logprobs else b""
        self.end = b"}]" + (b',"usage":null}\n\n' if include_usage else b"}\n\n")
        self.text_end = b"}" + self.logprobs + b',"finish_reason":null' + self.end

    def of_choice(self, index: int) -> bytes:
        return self.start + b'{"index":%d,"delta":{' % index

    def text_head(self, opening: bytes) -> bytes:
        return opening + b'"content":'

    def role(self, opening: bytes) -> bytes:
        return opening + b'"role":"assistant","content":"","refusal":null' + self.text_end

    def with_logprobs(self, opening: bytes, text: str, entries: bytes) -> bytes:
        head = self.text_head(opening) + to_json(text) + b'},"logprobs":{"content":['
        return head + entries + b'],"refusal":null},"finish_reason":null' + self.end

    def members(self, opening: bytes, members: bytes) -> bytes:
        return opening + members + self.text_end

    def finish(self, opening: bytes, reason: str) -> bytes:
        return opening + b"}" + self.logprobs + b',"finish_reason":' + to_json(reason) + self.end

    def usage(self, usage: UsageBody) -> bytes:
        return self.start + b'],"usage":' + to_json(usage) + b"}\n\n"


class ChatStream(EventStream):
    """CoreDeltas to server-sent events, each ready for the socket."""

    def __init__(self, head: ReplyHead, request: ChatRequest, texts: TokenTexts) -> None:
        n = request.controls.n
        super().__init__(Progress(1, n), request.include_usage)
        self._texts = None if request.controls.logprobs is None else texts
        self._parts = _ChunkParts(head, request.include_usage, self._texts is not None)
        self._openings = [self._parts.of_choice(index) for index in range(n)]
        self._text_heads = [self._parts.text_head(opening) for opening in self._openings]
        self._text_end = self._parts.text_end
        self._calls = call_readers(request)
        self._opened = False
        self._only_texts = False
        """Opened, and what comes until the end are texts."""

    def feed(self, delta: CoreDelta, prompt: int = 0) -> list[bytes]:
        """The events for one delta; none after an error."""
        if self.progress.error is not None:
            return []
        choice = self.progress.note(delta, prompt)
        if self._only_texts and choice.finish is None:
            text = delta.text
            return [self._text_heads[choice.index] + to_json(text) + self._text_end] if text else []
        opening = self._openings[choice.index]
        events = [] if self._opened else self._open()
        parts: list[Part] = []
        text = delta.text
        if self._calls is not None:
            text, parts = self._calls[choice.index].read(delta)
        if self._texts is not None and delta.logprobs:
            entries = self._texts.chat_entries(delta.logprobs)
            events.append(self._parts.with_logprobs(opening, text, entries))
        elif text:
            events.append(self._text_heads[choice.index] + to_json(text) + self._text_end)
        if parts:
            events += [self._parts.members(opening, call_members(part)) for part in parts]
        if choice.finish is None:
            return events
        if self.progress.error is None:
            events.append(self._parts.finish(opening, self._reason(choice)))
        return events + self._ending()

    def around_text(self) -> tuple[bytes, bytes] | None:
        """As EventStream."""
        if not self._only_texts or len(self._text_heads) > 1:
            return None
        return self._text_heads[0], self._text_end

    def _reason(self, choice: Choice) -> str:
        calls = self._calls
        return finish_reason(choice, None if calls is None else calls[choice.index])

    def _open(self) -> list[bytes]:
        """Before anything else each choice says its role, in order: clients count on index 0 being
        the first they hear of, whichever choice has its first token first."""
        self._opened = True
        self._only_texts = self._calls is None and self._texts is None
        return [self._parts.role(opening) for opening in self._openings]

    def _usage_event(self) -> bytes:
        return self._parts.usage(self.progress.usage())


class _Message(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: str | None = None
    annotations: list[str] = []
    tool_calls: list[CallBody] | msgspec.UnsetType = msgspec.UNSET


class _Logprobs(msgspec.Struct):
    content: msgspec.Raw
    refusal: None = None


class _Choice(msgspec.Struct, omit_defaults=True):
    index: int
    message: _Message
    finish_reason: str | None
    logprobs: _Logprobs | None = None


class _Body(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[_Choice]
    usage: UsageBody
    system_fingerprint: str
    object: str = "chat.completion"
    service_tier: str = "default"


def _called(reader: CallReader, text: str) -> _Message:
    """A message with whatever the text holds of calls."""
    said, calls = reader.read_whole(text)
    if not calls:
        return _Message(said)
    return _Message(said or None, tool_calls=calls)


class ChatCollector:
    """CoreDeltas to one chat.completion body."""

    def __init__(self, head: ReplyHead, request: ChatRequest, texts: TokenTexts) -> None:
        self.progress = Progress(1, request.controls.n)
        self._head = head
        self._texts = texts if request.controls.logprobs is not None else None
        self._calls = call_readers(request)
        self._entries: list[list[bytes]] = [[] for _ in self.progress.choices]

    def feed(self, delta: CoreDelta, prompt: int = 0) -> None:
        """Take one delta in; look at `progress.done` and `progress.error` then."""
        choice = self.progress.note(delta, prompt)
        if self._texts is not None and delta.logprobs:
            self._entries[choice.index].append(self._texts.chat_entries(delta.logprobs))

    def _choice(self, choice: Choice) -> _Choice:
        logprobs = None
        if self._texts is not None:
            content = b"[" + b",".join(self._entries[choice.index]) + b"]"
            logprobs = _Logprobs(msgspec.Raw(content))
        message, reason = _Message(choice.text), choice.finish
        if self._calls is not None:
            reader = self._calls[choice.index]
            message, reason = _called(reader, choice.text), finish_reason(choice, reader)
        return _Choice(choice.index, message, reason, logprobs)

    def body(self) -> bytes:
        """The JSON body; only when every choice is done."""
        return to_json(
            _Body(
                id=self._head.id,
                created=self._head.created,
                model=self._head.model,
                choices=[self._choice(choice) for choice in self.progress.choices],
                usage=self.progress.usage(),
                system_fingerprint=self._head.fingerprint,
            )
        )
