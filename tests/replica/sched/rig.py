"""A scheduler, a fake runner, and the plain sequential run that every schedule must equal."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from functools import partial

from events.output import FINISH_LENGTH
from events.request import SamplingParams
from kvstore.identity import KeyChain, block_key
from replica.engine.messages import ChildOutput, EngineRequest
from replica.sched.invariants import check_scheduler
from replica.sched.ledger import HORIZON_TOKENS, Limits
from replica.sched.order import Policy
from replica.sched.plan import ChildId, ExecutionPlan
from replica.sched.scheduler import Scheduler
from tests.fakes.adapter_loader import FakeAdapters
from tests.fakes.grammar import FakeGrammar
from tests.fakes.runner import FakeRunner, adapted, next_token
from tests.fakes.tiers import FakeTiers

KEY = b"k" * 32
ROOT = b"root"
VOCAB = 500

NextKey = Callable[[bytes, bytes], bytes]

real_key: NextKey = partial(block_key, KEY)


def constant_key(parent: bytes, tokens: bytes) -> bytes:
    """The worst hash that there is."""
    return b"\0" * 16


def short_key(parent: bytes, tokens: bytes) -> bytes:
    """4 bits of a hash, so that collisions are everywhere."""
    return (zlib.crc32(parent + tokens) % 16).to_bytes(16, "little")


def chain_of(
    prompt: Sequence[int], block_tokens: int, next_key: NextKey = real_key, root: bytes = ROOT
) -> KeyChain:
    """The chain of all full blocks of a prompt."""
    keys, parent = b"", root
    for start in range(0, len(prompt) - block_tokens + 1, block_tokens):
        parent = next_key(parent, array("I", prompt[start : start + block_tokens]).tobytes())
        keys += parent
    return KeyChain(keys, parent)


def tokens_of(seed: int, count: int) -> tuple[int, ...]:
    """Some prompt, the same for the same seed."""
    return tuple(zlib.crc32(f"{seed}/{place}".encode()) % VOCAB for place in range(count))


def sampling(max_tokens: int = 4, **fields: object) -> SamplingParams:
    """Greedy unless told otherwise."""
    return SamplingParams(**{"max_tokens": max_tokens, "seed": 0, "temperature": 0.0, **fields})


class Bench:
    """Steps a scheduler by hand and collects what each child got; every commit is checked."""

    def __init__(
        self,
        total_blocks: int = 32,
        block_tokens: int = 4,
        *,
        max_step_tokens: int = 16,
        max_running: int = 8,
        max_waiting_tokens: int = 10_000,
        context_tokens: int = 10_000,
        eos: int | None = None,
        next_key: NextKey = real_key,
        horizon_tokens: int = HORIZON_TOKENS,
        tiered: bool = False,
        policy: Policy | None = None,
        shadow: Policy | None = None,
        prefix_cache: bool = True,
        adapters: FakeAdapters | None = None,
        **limits: float | str,
    ) -> None:
        self.limits = Limits(
            total_blocks=total_blocks,
            block_tokens=block_tokens,
            context_tokens=context_tokens,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            max_waiting_tokens=max_waiting_tokens,
            horizon_tokens=horizon_tokens,
            **limits,
        )
        self.next_key = next_key
        self.runner = FakeRunner(total_blocks, block_tokens, VOCAB, eos)
        self.tiers = FakeTiers(self.runner) if tiered else None
        self.scheduler = Scheduler(
            self.limits,
            next_key,
            policy,
            after_commit=check_scheduler,
            tiers=self.tiers,
            shadow=shadow,
            prefix_cache=prefix_cache,
            adapters=adapters,
        )
        self.adapters = adapters
        if adapters is not None:
            adapters.attach(self.scheduler.adapter_landed)
            self.runner.adapters = adapters.resident
        if self.tiers is not None:
            self.tiers.landed = self.scheduler.landed
            self.tiers.written = self.scheduler.written
        self.specs: dict[int, EngineRequest] = {}
        self.outputs: dict[int, list[ChildOutput]] = {}
        self.now_s = 1.0
        self._children = 0

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        adapter: str = "",
        **fields: object,
    ) -> ChildId:
        """Submit a child; greedy, 4 tokens, without an adapter, if not told otherwise."""
        self._children += 1
        child = ChildId(self._children)
        eos_ids = frozenset() if self.runner.eos is None else frozenset({self.runner.eos})
        spec = EngineRequest(
            **{
                "child": child,
                "prompt": tuple(prompt),
                "chain": chain_of(
                    prompt, self.limits.block_tokens, self.next_key, ROOT + adapter.encode()
                ),
                "adapter": (adapter, "digest") if adapter else None,
                "params": params or sampling(),
                "seed": 7,
                "eos_ids": eos_ids,
                "tenant": "t",
                "arrival_s": float(child),
                **fields,
            }
        )
        self.specs[child] = spec
        self.outputs[child] = []
        self.scheduler.add(spec)
        self.collect()
        return child

    def plan(self) -> ExecutionPlan | None:
        """The first third of a step."""
        self.now_s += 1.0
        self.scheduler.expire(self.now_s)
        plan = self.scheduler.plan(self.now_s)
        self.collect()
        check_scheduler(self.scheduler)
        return plan

    def finish_step(self, plan: ExecutionPlan) -> None:
        """Execute and commit."""
        try:
            result = self.runner.execute(plan)
        except RuntimeError:
            self.scheduler.fail()
        else:
            self.scheduler.commit(result)
        self.collect()

    def step(self) -> ExecutionPlan | None:
        """Plan, execute, commit."""
        plan = self.plan()
        if plan is not None:
            self.finish_step(plan)
        return plan

    def run(self, limit: int = 2_000) -> int:
        """Step until nothing is left to do; returns the number of plans."""
        idle = plans = 0
        table = self.scheduler.table
        while self.scheduler.runnable or table.loading or table.writing:
            if self.tiers is not None:
                self.tiers.finish_all()
            if self.adapters is not None:
                self.adapters.finish_all()
            planned = self.step() is not None
            plans += planned
            idle = 0 if planned else idle + 1
            assert idle < 3, "requests wait, but nothing is planned"
            assert plans < limit, "this never ends"
        if self.tiers is not None:
            # Whoever was aborted while its blocks were written goes when they are.
            self.tiers.finish_all()
            self.collect()
        return plans

    def run_overlapped(self, limit: int = 2_000) -> int:
        """As `run`, with each plan made while the one before it executes; returns the number of
        plans that were made ahead."""
        ahead = plans = 0
        plan = None
        while plan is not None or self.scheduler.runnable:
            plan = plan or self.plan()
            assert plan is not None, "requests wait, but nothing is planned"
            following = self.scheduler.plan_ahead(self.now_s)
            check_scheduler(self.scheduler)
            self.collect()
            ahead += following is not None
            self.finish_step(plan)
            plan = following if self.scheduler.in_flight else None
            plans += 1
            assert plans < limit, "this never ends"
        return ahead

    def collect(self) -> None:
        """Take the outputs; each child's finish is its last one."""
        outputs = self.scheduler.take_outputs()
        assert len({output.child for output in outputs}) == len(outputs)
        for output in outputs:
            got = self.outputs[output.child]
            assert not got or got[-1].finish is None, "nothing comes after the finish"
            got.append(output)

    def tokens(self, child: int) -> list[int]:
        """What the child put out so far."""
        return [token for output in self.outputs[child] for token in output.token_ids]

    def finish(self, child: int) -> str | None:
        """Its finish reason, if it has ended."""
        return self.outputs[child][-1].finish if self.outputs[child] else None

    def cached(self, child: int) -> int:
        """Its cached tokens as told by its last output."""
        return self.outputs[child][-1].cached_tokens

    def wanted(self, child: int) -> list[int]:
        """What a plain run of the child alone would put out."""
        spec = self.specs[child]
        return [] if spec.write_to else plain_run(spec, self.runner)

    def assert_right(self, *children: int) -> None:
        """The children ended by themselves with exactly the plain run's tokens."""
        for child in children or tuple(self.specs):
            assert self.tokens(child) == self.wanted(child)
            assert self.finish(child) in (FINISH_LENGTH, "stop")

    def assert_empty(self) -> None:
        """Nothing is left of anybody, but the cache."""
        scheduler = self.scheduler
        check_scheduler(scheduler)
        assert len(scheduler.table) == 0
        assert not scheduler.in_flight
        assert scheduler.table.waiting_tokens == scheduler.table.waiting_hit_tokens == 0
        assert scheduler.cache.available == self.limits.total_blocks


def tight_bench(total_blocks: int, step_tokens: int, horizon_tokens: int) -> Bench:
    """Room for five at once, of answers that end by themselves."""
    return Bench(
        total_blocks,
        4,
        max_step_tokens=step_tokens,
        max_running=5,
        eos=3,
        horizon_tokens=horizon_tokens,
    )


def add_mixed(bench: Bench, index: int) -> None:
    """A request that shares its head with every third; lengths, randomness and penalties differ."""
    prompt = (*tokens_of(index % 3, 4 + index % 9), *tokens_of(index, 1 + index % 4))
    params = sampling(
        1 + index * 5 % 17,
        temperature=0.7 if index % 3 == 0 else 0.0,
        presence_penalty=0.5 if index % 4 == 0 else 0.0,
    )
    bench.add(prompt, params, seed=index)


def plain_run(spec: EngineRequest, runner: FakeRunner) -> list[int]:
    """One token after the other, no batch, no cache, no blocks."""
    known = list(spec.prompt)
    out: list[int] = []
    adapter = spec.adapter[0] if spec.adapter is not None else ""
    ends = set(spec.params.stop_token_ids)
    if not spec.params.ignore_eos:
        ends |= spec.eos_ids
    grammar = spec.grammar.fresh() if isinstance(spec.grammar, FakeGrammar) else None
    while len(out) < spec.params.max_tokens:
        suppress = tuple(ends) if len(out) < spec.params.min_tokens else ()
        probe = _Probe(spec, suppress, grammar)
        token = next_token(adapted(known, adapter), runner.vocab, runner.eos, probe)
        if grammar is not None and not grammar.advance([token]):
            break
        out.append(token)
        known.append(token)
        if token in ends or (grammar is not None and grammar.finished):
            break
    return out


class _Probe:
    """As much of a SampleSpec as the fake looks at."""

    def __init__(
        self, spec: EngineRequest, suppress_ids: tuple[int, ...], grammar: FakeGrammar | None
    ) -> None:
        self.grammar = grammar
        self.params = spec.params
        self.seed = spec.seed
        self.suppress_ids = suppress_ids
