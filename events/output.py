"""What travels up the link, from replica to router: one frame per engine step."""

from __future__ import annotations

import msgspec

from events.errors import CoreError
from events.numbers import TokenId
from events.session import Ack

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"
FINISH_ERROR = "error"
CLEAN_FINISHES = (FINISH_STOP, FINISH_LENGTH)
"""The answer is whole; any other reason, known or not, is a failure."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Raw (before temperature) natural logprob of one emitted token and its best alternatives."""

    token_id: TokenId
    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()


class Usage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Token counts of one child so far. `cached_tokens < prompt_tokens` always."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Stamps(msgspec.Struct, frozen=True, array_like=True):
    """Durations measured with the replica's monotonic clock, in ms from receipt."""

    scheduled_ms: float
    first_token_ms: float
    finished_ms: float


class CoreFinish(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a child ended. `error` is set exactly when `reason` is "error". `written_blocks`: the
    leading blocks of its prompt that were in the store when it ended, where it was to write them.
    """

    reason: str
    error: CoreError | None = None
    stop_reason: str | int | None = None
    stamps: Stamps | None = None
    recomputed_tokens: int = 0
    written_blocks: int = 0


class CoreDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New output of one child of one attempt; text, ids and logprobs are cut together.

    Joining the texts of all deltas gives the final text; sent text is never taken back.
    `logprobs` is empty unless asked for, else parallel to `token_ids`. `prompt_logprobs`: in a
    child's first delta, where they were asked for, one for each token of the prompt; nothing
    predicts the first one, whose logprob is NaN.
    """

    request_id: str
    attempt: int
    child: int
    text: str
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprob, ...]
    usage: Usage
    finish: CoreFinish | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class StepFrame(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """The deltas of all requests of this router that one engine step produced."""

    deltas: tuple[CoreDelta, ...]


class LinkWelcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="welcome"):
    """The replica's answer to `LinkHello`; a larger `boot` fences everything older.

    `continues`: it heeds `CoreRequest.progress`. `resumes`: it keeps named sessions, acknowledges
    and gives signs of life. `received`: the session goes on, and so many frames of the router have
    been taken in; None for a new one.
    """

    version: int
    replica: str
    boot: int
    continues: bool = False
    resumes: bool = False
    received: int | None = None


class CacheCleared(msgspec.Struct, frozen=True, kw_only=True, tag="cleared"):
    """Answer to `ClearCache`."""

    command_id: str
    blocks: int


ReplicaFrame = LinkWelcome | StepFrame | CacheCleared | Ack
