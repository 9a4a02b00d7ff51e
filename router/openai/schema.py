"""Requests after parsing: typed, checked against the limits, nothing left to interpret."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from events.grammar import Grammar
from router.openai.tools.choice import Calls
from router.openai.tools.formats import HERMES, ToolFormat


class Limits(Struct, frozen=True):
    """What one deployment accepts.

    `models` are the names that clients may ask for. `tool_calls`: whether past calls of tools are
    shown to the model. `tool_format`: how it writes calls. `grammars`: whether the form of an
    answer can be enforced.
    """

    models: frozenset[str]
    context_tokens: int
    vocab: int
    tool_calls: bool = False
    tool_format: ToolFormat = HERMES
    grammars: bool = True
    max_n: int = 8
    max_prompts: int = 32
    max_choices: int = 64
    max_messages: int = 2_048
    max_tools: int = 128
    max_stops: int = 4
    max_stop_chars: int = 256
    max_bias_entries: int = 1_024
    max_stop_token_ids: int = 64
    max_bad_words: int = 256
    max_bad_word_chars: int = 64


class Controls(Struct, frozen=True):
    """How to sample, as the client said it; `to_sampling` makes it final.

    `max_tokens` None takes what fits, `seed` None lets the gateway mint one. `logprobs` is None for
    none, else the number of alternatives beside the chosen token. Of `best_of` answers (None: `n`)
    the likeliest `n` are shown.
    """

    max_tokens: int | None = None
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    bad_words: tuple[str, ...] = ()

    @property
    def answers(self) -> int:
        """How many are generated for each prompt."""
        return self.best_of or self.n

    @property
    def ranked(self) -> bool:
        """Whether some of them are not shown."""
        return self.answers > self.n


class ChatRequest(Struct, frozen=True):
    """POST /v1/chat/completions.

    `messages` (a list, or as the body has them) and `tools` have the shape that chat templates
    take: contents are plain strings,
    "developer" is already "system", arguments of past tool calls are objects where they parse.
    `calls`: what may be called in the answer.
    """

    model: str
    messages: Sequence[dict[str, Any]]
    controls: Controls
    tools: list[dict[str, Any]] | None = None
    calls: Calls | None = None
    stream: bool = False
    include_usage: bool = False


class CompletionRequest(Struct, frozen=True):
    """POST /v1/completions.

    Each of `prompts` is a text, or token ids as u32 little endian; it gives a group of `n` choices:
    choice i of prompt p has the index p * n + i.
    """

    model: str
    prompts: tuple[str | bytes, ...]
    controls: Controls
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
