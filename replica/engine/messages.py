"""The words between the front (event loop) and the engine (its own thread)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from configs.schema import WARM_SHARE
from events.cache import CacheFact
from events.errors import CoreError
from events.load import DecodeFit, PrefillFit
from events.output import TokenLogprob
from events.request import SamplingParams
from kvstore.identity import KeyChain
from replica.grammar.state import GrammarState
from replica.sched.plan import ChildId, PlanId
from replica.sched.tiers import Tiers


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One child for the engine. `arrival_s` is monotonic, and so are `first_by_s`, when its first
    token is due, and `deadline_s`, when it ends. `itl_ms`: the gap between tokens that it was
    promised. `weight`: its tenant's share where several wait.

    `chain` holds the keys of the prompt's full blocks and the value that the next block chains to.
    `eos_ids` end the child unless `params.ignore_eos`. `output`: tokens that it has put out
    already, elsewhere; it goes on behind them as after a preemption. `salt` and
    `public_cut_blocks`: what `chain` was made with. `grammar`: where it stands in the grammar of
    `params`, behind `output`; from here on the engine's own. `write_to`: as of CoreRequest.
    `warm_share`: of the pool, what its tenant keeps while others need room. `adapter`: name and
    content digest of the LoRA adapter that it is computed with.
    """

    child: ChildId
    prompt: tuple[int, ...]
    chain: KeyChain
    params: SamplingParams
    seed: int
    eos_ids: frozenset[int]
    tenant: str
    arrival_s: float
    priority: int = 0
    weight: float = 1.0
    itl_ms: float | None = None
    first_by_s: float | None = None
    deadline_s: float | None = None
    skip_cache_read: bool = False
    router_boot: str = ""
    dispatch_seq: int = 0
    output: tuple[int, ...] = ()
    salt: bytes = b""
    public_cut_blocks: int = 0
    grammar: GrammarState | None = None
    write_to: str = ""
    warm_share: float = WARM_SHARE
    adapter: tuple[str, str] | None = None

    @property
    def known_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt) + len(self.output)


@dataclass(frozen=True, slots=True)
class ChildOutput:
    """What one step gave to one child. `finish` is one of events.output.FINISH_*, or None.
    `written_blocks`: as of CoreFinish."""

    child: ChildId
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    cached_tokens: int
    finish: str | None = None
    stop_token: int | None = None
    error: CoreError | None = None
    scheduled_s: float = 0.0
    recomputed_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    written_blocks: int = 0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Immutable; handed to the sink on the engine thread, right after the commit."""

    plan_id: PlanId
    children: tuple[ChildOutput, ...]


@dataclass(frozen=True, slots=True)
class ShadowCounts:
    """Of `started` requests, `differed` would have been behind another one, and behind `overtaken`
    of those that waited, in all; `refused` would have been told that they come too late."""

    started: int = 0
    differed: int = 0
    overtaken: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class AdapterState:
    """Which LoRA adapters are in memory, least recently used first, and how many of them requests
    compute with. `load_ms`: how long the last load of each took; `avoided_until_s`: of those whose
    last one failed, until when (monotonic) nobody should ask for them here. The other numbers count
    since start, but for `loading`: those under way."""

    resident: tuple[str, ...] = ()
    in_use: int = 0
    loading: int = 0
    loads: int = 0
    failures: int = 0
    evictions: int = 0
    load_ms: Mapping[str, float] = field(default_factory=dict)
    avoided_until_s: Mapping[str, float] = field(default_factory=dict)


NO_ADAPTERS = AdapterState()


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot that the engine replaces after each step; readable from any thread.

    By reason: `displaced`, preemptions for the sake of one that waits; `later` and `never`, how
    often a request was not admitted yet, or refused. `held_requests` wait for their readers and
    keep `held_blocks` blocks; `held`: what became of the KV of such (see Lifecycle). `warm`: cached
    blocks by tenant, of those that hold most.
    """

    waiting: int
    running: int
    queued_prefill_tokens: int
    running_context_tokens: int
    free_blocks: int
    cached_blocks: int
    total_blocks: int
    step_ms: float
    steps: int
    prefill: PrefillFit
    decode: DecodeFit
    seen: dict[str, int]
    prompt_tokens_total: int
    cached_tokens_total: int
    preemptions_total: int
    last_step_s: float
    alive: bool
    shadow: ShadowCounts | None = None
    recomputed_tokens_total: int = 0
    displaced: Mapping[str, int] = field(default_factory=dict)
    later: Mapping[str, int] = field(default_factory=dict)
    never: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    held_requests: int = 0
    held_blocks: int = 0
    failed_plans: int = 0
    broken_invariants: int = 0
    adapters: AdapterState = NO_ADAPTERS
    warm: Mapping[str, int] | None = None


class StepSink(Protocol):
    """Where outputs go. Called on the engine thread: must return at once and never raise."""

    def __call__(self, output: StepOutput) -> None: ...


class EngineTiers(Tiers, Protocol):
    """The tiers below the device, as the engine owns them: started before its thread, closed after
    its last step and before the runner."""

    def attach(
        self,
        landed: Callable[[ChildId, int], None],
        prefill: Callable[[], PrefillFit],
        generation: Callable[[int], int],
        written: Callable[[ChildId, int], None],
    ) -> None:
        """What they need of the engine; all of it may be called on any thread."""

    def start(self) -> None:
        """Start helper threads."""

    def clear(self) -> None:
        """Delete what the tiers are known to hold. May wait for them: not for the engine thread."""

    def close(self) -> None:
        """The device is not touched any more when this returns."""


class AdapterLoader(Protocol):
    """Has LoRA adapters brought into memory. `load` and `drop` are called on the engine thread and
    return at once."""

    @property
    def names(self) -> frozenset[str]:
        """All that there are."""

    def attach(self, landed: Callable[[str, bool], None]) -> None:
        """Whom to tell of the one terminal event of each load, on any thread."""

    def load(self, name: str) -> None:
        """Begin to load one of `names` that is not in memory."""

    def drop(self, name: str) -> None:
        """No plan will name it before it is loaded again: free its memory."""

    def close(self) -> None:
        """Nothing is loaded any more when this returns, or shortly after."""


class Engine(Protocol):
    """The engine as the front sees it. Every method is thread-safe and returns at once.

    The sink is given at construction: it exists before any request can be submitted. Each child
    that is submitted gets exactly one ChildOutput with `finish` set, whatever happens.
    """

    def submit(self, request: EngineRequest) -> None:
        """Into the inbox. A request that can never fit finishes with an error."""

    def abort(self, child: ChildId, answered: bool = False) -> None:
        """Idempotent; unknown or finished children are ignored. The child ends with "abort".

        `answered`: nobody left it, its answer is whole (a stop string came).
        """

    def hold(self, child: ChildId) -> None:
        """Keep the child, schedule nothing of it."""

    def resume(self, child: ChildId) -> None:
        """Undo hold."""

    def clear_cache(self, limit_blocks: int | None = None, below: bool = True) -> int:
        """Drop every cached block that is not leased; returns how many. Blocks up to a step.

        With `below`, what the tiers below are known to hold goes too. From then on at most
        `limit_blocks` blocks of the pool are used; None: the whole pool.
        """

    def drain_facts(self) -> list[CacheFact]:
        """Journal entries since the last call, in commit order; a single reader."""

    def load(self) -> EngineLoad:
        """The newest snapshot."""
