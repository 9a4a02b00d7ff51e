"""Answers of /v1/completions: a stream of chunks, or one body."""

from __future__ import annotations

import msgspec
import numpy as np

from events.output import CoreDelta
from router.openai.logprobs import CompletionLogprobs, OffsetCounter, TokenTexts
from router.openai.progress import Choice, Progress
from router.openai.ranking import Ranking
from router.openai.schema import CompletionRequest
from router.openai.stream import EventStream, ReplyHead, to_json
from router.openai.usage import UsageBody


def _prompt_text(prompt: str | bytes, texts: TokenTexts) -> str:
    if isinstance(prompt, str):
        return prompt
    return texts.decode(np.frombuffer(prompt, dtype="<u4").tolist())


def _echoes(request: CompletionRequest, texts: TokenTexts) -> list[str]:
    """What each choice repeats before its answer: the prompt, or nothing."""
    n = request.controls.answers
    if not request.echo:
        return [""] * (len(request.prompts) * n)
    return [_prompt_text(prompt, texts) for prompt in request.prompts for _ in range(n)]


def _counters(request: CompletionRequest, texts: TokenTexts) -> list[OffsetCounter] | None:
    """One per choice where logprobs are asked for."""
    if request.controls.logprobs is None:
        return None
    starts = [0 if request.echo else len(_prompt_text(p, texts)) for p in request.prompts]
    answers = range(request.controls.answers)
    return [OffsetCounter(texts, start) for start in starts for _ in answers]


def _lists(counter: OffsetCounter, delta: CoreDelta, as_ids: bool) -> CompletionLogprobs:
    """Of the prompt, where the delta tells of it, and of what was generated."""
    found = counter.lists(delta.prompt_logprobs, specials=as_ids)
    found.extend(counter.lists(delta.logprobs))
    return found


class _ChunkParts:
    """The constant pieces of every chunk of one stream; a chunk is their concatenation."""

    def __init__(self, head: ReplyHead, include_usage: bool) -> None:
        self.start = (
            b'data: {"id":' + to_json(head.id) + b',"object":"text_completion","created":'
            b"%d" % head.created + b',"choices":['
        )
        self.opening = self.start + b'{"text":'
        self.model = b'],"model":' + to_json(head.model)
        self.end = b"}" + self.model + (b',"usage":null}\n\n' if include_usage else b"}\n\n")
        self.plain_end = b',"logprobs":null,"finish_reason":null' + self.end

    def of_choice(self, index: int) -> bytes:
        return b',"index":%d' % index

    def text(self, index: bytes, text: str) -> bytes:
        return self.opening + to_json(text) + index + self.plain_end

    def full(
        self, index: bytes, text: str, logprobs: CompletionLogprobs | None, reason: str | None
    ) -> bytes:
        head = self.opening + to_json(text) + index + b',"logprobs":' + to_json(logprobs)
        return head + b',"finish_reason":' + to_json(reason) + self.end

    def usage(self, usage: UsageBody) -> bytes:
        return self.start + self.model + b',"usage":' + to_json(usage) + b"}\n\n"


class CompletionStream(EventStream):
    """CoreDeltas to server-sent events, each ready for the socket."""

    def __init__(self, head: ReplyHead, request: CompletionRequest, texts: TokenTexts) -> None:
        progress = Progress(len(request.prompts), request.controls.n)
        super().__init__(progress, request.include_usage)
        self._parts = _ChunkParts(head, request.include_usage)
        self._indexes = [self._parts.of_choice(choice.index) for choice in progress.choices]
        self._echoes = _echoes(request, texts)
        self._counters = _counters(request, texts)
        self._as_ids = [isinstance(prompt, bytes) for prompt in request.prompts]

    def feed(self, delta: CoreDelta, prompt: int = 0) -> list[bytes]:
        """The events for one delta of the prompt with that number; none after an error."""
        if self.progress.error is not None:
            return []
        choice = self.progress.note(delta, prompt)
        index = self._indexes[choice.index]
        text = delta.text
        if echo := self._echoes[choice.index]:
            text, self._echoes[choice.index] = echo + text, ""
        if choice.finish is None and not delta.logprobs and not delta.prompt_logprobs:
            return [self._parts.text(index, text)] if text else []
        reason = None if self.progress.error is not None else choice.finish
        events = []
        if text or delta.logprobs or delta.prompt_logprobs or reason:
            logprobs = self._logprobs(choice, delta, prompt)
            events.append(self._parts.full(index, text, logprobs, reason))
        return events if choice.finish is None else events + self._ending()

    def around_text(self) -> tuple[bytes, bytes] | None:
        """As EventStream."""
        if len(self._indexes) > 1 or self._echoes[0] or self._counters is not None:
            return None
        return self._parts.opening, self._indexes[0] + self._parts.plain_end

    def _logprobs(self, choice: Choice, delta: CoreDelta, prompt: int) -> CompletionLogprobs | None:
        if self._counters is None or not (delta.logprobs or delta.prompt_logprobs):
            return None
        return _lists(self._counters[choice.index], delta, self._as_ids[prompt])

    def _usage_event(self) -> bytes:
        return self._parts.usage(self.progress.usage())


class _Choice(msgspec.Struct):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class _Body(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[_Choice]
    usage: UsageBody
    object: str = "text_completion"


class CompletionCollector:
    """CoreDeltas to one text_completion body."""

    def __init__(self, head: ReplyHead, request: CompletionRequest, texts: TokenTexts) -> None:
        controls = request.controls
        self.progress = Progress(len(request.prompts), controls.answers)
        self._head = head
        self._echoes = _echoes(request, texts)
        self._counters = _counters(request, texts)
        self._as_ids = [isinstance(prompt, bytes) for prompt in request.prompts]
        self._logprobs = [CompletionLogprobs([], [], [], []) for _ in self.progress.choices]
        self._ranking = Ranking(len(request.prompts), controls.answers, controls.n)

    def feed(self, delta: CoreDelta, prompt: int = 0) -> None:
        """Take one delta in; look at `progress.done` and `progress.error` then."""
        choice = self.progress.note(delta, prompt)
        self._ranking.note(choice.index, delta.logprobs)
        if self._counters is not None:
            more = _lists(self._counters[choice.index], delta, self._as_ids[prompt])
            self._logprobs[choice.index].extend(more)

    def _choice(self, index: int, candidate: int) -> _Choice:
        choice = self.progress.choices[candidate]
        logprobs = None if self._counters is None else self._logprobs[candidate]
        return _Choice(self._echoes[candidate] + choice.text, index, logprobs, choice.finish)

    def body(self) -> bytes:
        """The JSON body; only when every choice is done."""
        return to_json(
            _Body(
                id=self._head.id,
                created=self._head.created,
                model=self._head.model,
                choices=[self._choice(*place) for place in enumerate(self._ranking.shown())],
                usage=self.progress.usage(),
            )
        )
