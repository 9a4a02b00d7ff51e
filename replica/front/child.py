"""One child of an attempt, as the front keeps it: the engine's outputs in, deltas out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from events.errors import CoreError
from events.output import FINISH_STOP, CoreDelta, CoreFinish, Stamps, TokenLogprob, Usage
from replica.engine.messages import ChildOutput
from replica.front.stream import Piece, TokenStream
from replica.sched.plan import ChildId

if TYPE_CHECKING:
    from replica.front.attempts import Attempt


class Child:
    """`id` is the engine's and ours alone; the router knows (request_id, attempt, index)."""

    __slots__ = (
        "_cached_tokens",
        "_first_token_s",
        "_prompt_logprobs",
        "_recomputed_tokens",
        "_scheduled_s",
        "_stream",
        "_written_blocks",
        "attempt",
        "id",
        "index",
    )

    def __init__(self, child_id: ChildId, index: int, attempt: Attempt, stream: TokenStream):
        self.id = child_id
        self.index = index
        self.attempt = attempt
        self._stream = stream
        self._cached_tokens = 0
        self._recomputed_tokens = 0
        self._written_blocks = 0
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._scheduled_s: float | None = None
        self._first_token_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time from receipt to the first token, once there is one."""
        return None if self._first_token_s is None else self._first_token_s - self._received_s

    @property
    def _received_s(self) -> float:
        return self.attempt.received_s

    def advance(self, output: ChildOutput, now_s: float) -> CoreDelta | None:
        """Take one step's output in. None when nothing of it may be shown yet.

        The delta carries a finish when the engine ended the child, or when a stop string did.
        """
        self._note(output, now_s)
        ended_by = self._push(output)
        stream = self._stream
        if output.finish is None and stream.stopped_by is None:
            piece = stream.take()
            return self._delta(piece, None) if piece.token_ids or piece.text else None
        if ended_by is not None:
            stream.end_with(ended_by)
        shown_reason = ended_by if ended_by in self.attempt.stop_token_ids else None
        return self._end(output.finish or FINISH_STOP, output.error, shown_reason, now_s)

    def close(self, reason: str, error: CoreError | None, now_s: float) -> CoreDelta:
        """End the child whatever the engine says later; what was held back is shown."""
        return self._end(reason, error, None, now_s)

    def _note(self, output: ChildOutput, now_s: float) -> None:
        self._cached_tokens = output.cached_tokens
        self._recomputed_tokens = output.recomputed_tokens
        self._written_blocks = output.written_blocks
        self._prompt_logprobs += output.prompt_logprobs
        if self._scheduled_s is None and output.scheduled_s > 0:
            self._scheduled_s = output.scheduled_s
        if self._first_token_s is None and output.token_ids:
            self._first_token_s = now_s

    def _push(self, output: ChildOutput) -> int | None:
        """Feed the stream; returns the end token, which is counted but never shown."""
        tokens = output.token_ids
        ended_by = output.stop_token
        if ended_by is not None and tokens and tokens[-1] == ended_by:
            tokens = tokens[:-1]
        for index, token_id in enumerate(tokens):
            if not self._stream.push(token_id, output.logprobs[index] if output.logprobs else None):
                return None
        return ended_by

    def _end(
        self, reason: str, error: CoreError | None, stop_reason: str | int | None, now_s: float
    ) -> CoreDelta:
        piece = self._stream.finish()
        if self._stream.stopped_by is not None:
            reason, error, stop_reason = FINISH_STOP, None, self._stream.stopped_by
        finish = CoreFinish(
            reason=reason,
            error=error,
            stop_reason=stop_reason,
            stamps=Stamps(
                self._since_receipt_ms(self._scheduled_s, now_s),
                self._since_receipt_ms(self._first_token_s, now_s),
                self._since_receipt_ms(now_s, now_s),
            ),
            recomputed_tokens=self._recomputed_tokens,
            written_blocks=self._written_blocks,
        )
        return self._delta(piece, finish)

    def _since_receipt_ms(self, moment_s: float | None, now_s: float) -> float:
        """What never happened is stamped with the end."""
        return max(0.0, ((now_s if moment_s is None else moment_s) - self._received_s) * 1e3)

    def _delta(self, piece: Piece, finish: CoreFinish | None) -> CoreDelta:
        attempt = self.attempt
        usage = Usage(attempt.prompt_tokens, self._cached_tokens, self._stream.tokens)
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, ()
        return CoreDelta(
            attempt.key.request_id,
            attempt.key.attempt,
            self.index,
            piece.text,
            piece.token_ids,
            piece.logprobs,
            usage,
            finish,
            prompt_logprobs,
        )
