"""What travels down the link, from router to replica: requests and their cancellation."""

from __future__ import annotations

import msgspec
import numpy as np

from configs.schema import WARM_SHARE
from events.grammar import Grammar
from events.session import Ack

LINK_VERSION = 1
"""Raised when a link frame changes in a way that an older reader would misread."""

MAX_LINK_FRAME_BYTES = 16 * 1024 * 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample one request; validated by the gateway, final for the engine.

    `top_k = 0` and `min_p = 0.0` mean off; `temperature = 0.0` means greedy. `logprobs` is None for
    none, else the number of alternatives (0 to 20) beside the chosen token. `seed` is always set:
    the gateway mints one where the client gave none; child i of `n` uses `seed + i`. With a
    `grammar` every child's text fits it, and ends where it can't go on.
    """

    max_tokens: int
    seed: int
    n: int = 1
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
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None


class ChildProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far one child had come elsewhere. `output`: the ids that its client has, u32 little
    endian. A child that has `finished` is not generated again."""

    output: bytes = b""
    finished: bool = False

    def token_ids(self) -> np.ndarray:
        """`output` as uint32, shape (tokens,). Raises ValueError on a ragged buffer."""
        return np.frombuffer(self.output, dtype="<u4")


class CoreRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="submit"):
    """One request as the replica gets it: ids only, no messages, no key of a tenant.

    `prompt` holds the token ids as u32 little endian. `salt` is the cache scope that the gateway
    derived from the authenticated tenant; `public_cut_blocks` full blocks at the head are hashed
    without it (a registered public prefix). Deadlines are budgets in ms from receipt.
    `(router_boot, dispatch_seq)` comes back in load reports, so that the router knows which of its
    own dispatches a report has already seen. `weight`: the tenant's share where others wait too;
    `warm_share`: of the replica's blocks, what it keeps while others need room.
    `believed_queue_tokens`: the prefill that the router believes to wait there; where far more
    waits the replica may send the request elsewhere. None where it may not.

    `progress` is empty, or one entry for each of `n` children: then they go on where another
    replica broke off. What the client has counts as output (limits, penalties, positions), and
    deltas hold only what follows; their usage counts everything.

    `write_to`: no answer is wanted. The prompt is computed, and its full blocks are written to the
    store of that name in the replica's hello; the end, without a token, comes once that is done or
    can't be, and says how many are there. `max_tokens` and `n` are 1 then.

    `adapter`: name and content digest of the LoRA adapter to compute with, both of the namespace of
    its block keys; a replica that has another content under the name refuses.
    """

    request_id: str
    attempt: int
    trace_id: str
    tenant: str
    model: str
    prompt: bytes
    salt: bytes
    sampling: SamplingParams
    router_boot: str
    dispatch_seq: int
    public_cut_blocks: int = 0
    priority: int = 0
    weight: float = 1.0
    ttft_deadline_ms: float | None = None
    itl_deadline_ms: float | None = None
    e2e_deadline_ms: float | None = None
    predicted_cached_tokens: int = 0
    believed_queue_tokens: int | None = None
    warm_share: float = WARM_SHARE
    progress: tuple[ChildProgress, ...] = ()
    write_to: str = ""
    adapter: tuple[str, str] | None = None

    def token_ids(self) -> np.ndarray:
        """The prompt as uint32, shape (prompt_tokens,). Raises ValueError on a ragged buffer."""
        return np.frombuffer(self.prompt, dtype="<u4")


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Stop one attempt, at whatever stage it is; idempotent, unknown ids are ignored."""

    request_id: str
    attempt: int


class Hold(msgspec.Struct, frozen=True, kw_only=True, tag="hold"):
    """Keep the request but schedule nothing of it (its reader is slow) until `Resume`."""

    request_id: str
    attempt: int


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """Undo `Hold`."""

    request_id: str
    attempt: int


class ClearCache(msgspec.Struct, frozen=True, kw_only=True, tag="clear"):
    """Forget every cached block that nobody leases (benchmarks, operations).

    From then on at most `limit_blocks` blocks of the pool are used; None: the whole pool.
    """

    command_id: str
    limit_blocks: int | None = None


class LinkHello(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="hello"):
    """First frame of the dialling router; `secret` is compared in constant time.

    `session` names what may go on over several connections; a new one ends what the same router
    boot had before. With `received`, the frames that the router has of it, it asks to resume.
    Without a name the session ends with its connection.
    """

    version: int
    router_id: str
    router_boot: str
    secret: str
    session: str = ""
    received: int | None = None


RouterFrame = LinkHello | CoreRequest | Abort | Hold | Resume | ClearCache | Ack
