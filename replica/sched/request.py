"""One child inside the scheduler: its tokens, its blocks, how far it is, and in which state.

Never leaves the engine thread. What others see are plan rows, outputs and load numbers.
"""

from __future__ import annotations

import math
from array import array
from enum import Enum, auto

from events.output import TokenLogprob
from replica.cache.node import Node
from replica.engine.messages import EngineRequest
from replica.sched.order import UNRANKED, Rank
from replica.sched.plan import PENDING, ChildId, SampleSpec, Scoring

_NO_IDS: tuple[int, ...] = ()


class State(Enum):
    """QUEUED > (LOADING) > RUNNING <> HELD; RUNNING > DRAINING > QUEUED; RUNNING > (WRITING) >
    FINISHING > GONE; ABORTING > GONE.

    LOADING waits for blocks from the tiers below, WRITING for its own to be there. DRAINING,
    ABORTING and FINISHING wait for rows in flight and for both of these, and pass at once when
    there are none.
    """

    QUEUED = auto()
    LOADING = auto()
    RUNNING = auto()
    HELD = auto()
    WRITING = auto()
    DRAINING = auto()
    ABORTING = auto()
    FINISHING = auto()
    GONE = auto()


class Request:
    """`tokens` is all that is known, prompt and output. `computed` counts tokens whose KV is there
    or planned, `committed` those whose KV is certain; they differ only while a row is in flight.
    `found`: the last of its blocks that was found in the cache, while it waits.
    `lost_tokens`: the most that it had whenever it was preempted. `rent_ms`: what its KV has
    cost others while it is held, `held_cost_ms` in all holds before.
    `adapter`: the name of its LoRA adapter, or empty; `adapter_since_s`: since when it waits for
    a place of it.
    """

    __slots__ = (
        "_penalised",
        "_suppress",
        "_table",
        "adapter",
        "adapter_since_s",
        "blocks",
        "cached_tokens",
        "committed",
        "computed",
        "expected_hit",
        "failures",
        "found",
        "held_cost_ms",
        "holds_adapter",
        "in_flight",
        "incarnation",
        "keys",
        "lost_tokens",
        "next_parent",
        "nodes",
        "on_hold",
        "placeholders",
        "preemptions",
        "prompt_scores",
        "queued_tokens",
        "rank",
        "recomputed_tokens",
        "rent_ms",
        "scheduled_s",
        "sealed",
        "spec",
        "state",
        "suspect",
        "tokens",
        "transfers",
    )

    def __init__(self, spec: EngineRequest, rank: Rank = UNRANKED) -> None:
        self.spec = spec
        self.rank = rank
        self.state = State.QUEUED
        self.tokens = array("I", (*spec.prompt, *spec.output))
        self.keys: list[bytes] = list(spec.chain)
        self.next_parent = spec.chain.parent
        self.blocks: list[int] = []
        self.nodes: list[Node] = []
        self.found: Node | None = None
        self.sealed = False
        self.computed = self.committed = 0
        self.placeholders = self.in_flight = self.transfers = 0
        self.incarnation = 0
        self.on_hold = False
        self.suspect = False
        self.failures = self.preemptions = 0
        self.expected_hit = self.queued_tokens = 0
        self.cached_tokens = self.recomputed_tokens = self.lost_tokens = 0
        self.scheduled_s = 0.0
        self.held_cost_ms = self.rent_ms = 0.0
        self.adapter = spec.adapter[0] if spec.adapter is not None else ""
        self.holds_adapter = False
        self.adapter_since_s = 0.0
        self.prompt_scores: list[TokenLogprob] = []
        self._table: tuple[int, ...] = ()
        self._suppress = self._suppress_ids()
        params = spec.params
        self._penalised = (
            params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
            or params.repetition_penalty != 1.0
            or bool(params.bad_words)
        )

    @property
    def child(self) -> ChildId:
        """Its number."""
        return self.spec.child

    @property
    def debt(self) -> int:
        """Tokens that are known, or will be when the rows in flight are back, but not computed."""
        return len(self.tokens) + self.placeholders - self.computed

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.spec.prompt)

    @property
    def generated(self) -> int:
        """Tokens that it has put out, here or before it came here."""
        return len(self.tokens) - len(self.spec.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that it may still put out."""
        return self.spec.params.max_tokens - self.generated

    @property
    def plannable(self) -> bool:
        """Whether its next row can be planned: not where that takes a token still in flight (for a
        penalty or a grammar), nor where that token is the last one that it may put out."""
        if not self.placeholders:
            return True
        free = not self._penalised and self.spec.grammar is None
        return free and self.remaining > self.placeholders

    @property
    def over(self) -> bool:
        """Whether it has already been told its end."""
        return self.state in (State.ABORTING, State.FINISHING, State.GONE)

    @property
    def cache_limit(self) -> int:
        """Tokens that may come from the cache: all but the last one, which has to be computed."""
        if self.spec.skip_cache_read and not self.generated:
            return 0
        return len(self.tokens) - 1

    def key_before(self, index: int) -> bytes:
        """The key of the block before block `index`; empty for the first one."""
        return self.keys[index - 1] if index else b""

    def table(self) -> tuple[int, ...]:
        """A snapshot of the block table; made anew only when the table has grown."""
        if len(self._table) != len(self.blocks):
            self._table = tuple(self.blocks)
        return self._table

    def attach(self, blocks: list[int], nodes: list[Node], block_tokens: int) -> None:
        """Start from a leased prefix: its KV is there already."""
        self.blocks, self.nodes, self._table = list(blocks), list(nodes), ()
        self.found = None
        self.computed = self.committed = len(blocks) * block_tokens

    def next_tokens(self, count: int) -> tuple[int, ...]:
        """The tokens to compute next; PENDING for one that is in flight."""
        tokens = tuple(self.tokens[self.computed : self.computed + count])
        return tokens if len(tokens) == count else (*tokens, PENDING)

    def detach(self) -> list[int]:
        """Forget the KV; the blocks go to the caller, who releases them."""
        self.found = self.nodes[-1] if self.nodes else None
        blocks, self.blocks, self.nodes, self._table = self.blocks, [], [], ()
        self.computed = self.committed = 0
        self.sealed = False
        self.prompt_scores.clear()
        self.incarnation += 1
        return blocks

    def sample_spec(self, position: int) -> SampleSpec:
        """How to sample the token at `position`, the one behind all known tokens."""
        spec = self.spec
        early = self.generated + self.placeholders < spec.params.min_tokens
        return SampleSpec(
            params=spec.params,
            seed=spec.seed,
            position=position,
            prompt_ids=spec.prompt if self._penalised else _NO_IDS,
            output_ids=tuple(self.tokens[len(spec.prompt) :]) if self._penalised else _NO_IDS,
            suppress_ids=self._suppress if early else _NO_IDS,
            grammar=spec.grammar,
        )

    def scoring(self, start: int, end: int) -> Scoring | None:
        """What to tell of the prompt's tokens behind those at positions start to end - 1; nothing
        once the first token is out, which took them along."""
        wanted, prompt = self.spec.params.prompt_logprobs, self.spec.prompt
        targets = prompt[start + 1 : end + 1] if wanted is not None else _NO_IDS
        return Scoring(targets, wanted or 0) if targets and not self.generated else None

    def take_scores(self) -> tuple[TokenLogprob, ...]:
        """Those of the whole prompt, once; nothing predicts its first token."""
        if self.spec.params.prompt_logprobs is None or self.generated != 1:
            return ()
        scores = (TokenLogprob(self.spec.prompt[0], math.nan), *self.prompt_scores)
        self.prompt_scores.clear()
        return scores

    def ends_with(self, token_id: int) -> bool:
        """Whether `token_id` ends the child."""
        spec = self.spec
        if token_id in spec.params.stop_token_ids:
            return True
        return token_id in spec.eos_ids and not spec.params.ignore_eos

    def _suppress_ids(self) -> tuple[int, ...]:
        params = self.spec.params
        if params.min_tokens == 0:
            return _NO_IDS
        ends = set(params.stop_token_ids)
        return tuple(sorted(ends if params.ignore_eos else ends | self.spec.eos_ids))
