"""A whole run: arrivals of a trace, the real router, replicas that only take time.

Nothing here decides anything: the router's brain chooses, the replicas' schedulers serve, the
agenda moves time. The same settings give the same run to the bit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from msgspec import structs

from configs.schema import RouterConfig
from events.decision import RouteDecision
from events.load import ReplicaHello
from events.request import SamplingParams
from kvstore.identity import Namespace, block_key, chain
from replica.engine.messages import ChildOutput, EngineRequest
from replica.sched.plan import ChildId
from replica.sched.scheduler import Scheduler
from router.choice.choose import RouterBrain
from router.choice.route import HandOff, NoReplica, Outcome, RouteQuery
from router.fleet.expected import Expected, pool_name
from router.fleet.fleet import Fleet
from tools.sim.call import Call, Trace
from tools.sim.clairvoyant import most_able
from tools.sim.clock import Agenda
from tools.sim.faults import Fault
from tools.sim.hand_off import Job, SimSplitter
from tools.sim.hello import blocks_of, make_hello, make_limits
from tools.sim.prompt import CLUSTER_KEY, TENANT_SALT, prompt_ids
from tools.sim.record import Record
from tools.sim.replica import SimReplica
from tools.sim.run import Run, run_of
from tools.sim.settings import CLAIRVOYANT, Settings
from tools.sim.tiers import SimTiers, Store
from tools.sim.wire import Wire

RETRY_S = 0.5
NEVER_S = 1e9
"""The TTFT of who gets no token."""


@dataclass(slots=True)
class _Open:
    """A request on its way."""

    call: Call
    record: Record
    request: EngineRequest
    decision: RouteDecision | None = None
    first_s: float = 0.0
    hand_off: HandOff | None = None
    failed: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Seat:
    """A replica's name with its present life."""

    replica: SimReplica
    wire: Wire
    open: dict[ChildId, _Open] = field(default_factory=dict)
    computing: dict[ChildId, tuple[_Open, Job]] = field(default_factory=dict)


class World:
    """One trace under one policy. `brain` is the router's present life."""

    def __init__(self, trace: Trace, settings: Settings) -> None:
        self._trace = trace
        self._settings = settings
        self._agenda = Agenda()
        self._rng = random.Random(settings.seed)
        self._hello = make_hello(trace.block_tokens, settings)
        self._namespace = Namespace.of_hello(self._hello)
        self._pool = pool_name(self._hello)
        self._shared = {
            tier: Store(blocks_of(tier.tokens, trace.block_tokens)) for tier in settings.tiers
        }
        self._seats: dict[str, _Seat] = {}
        self._past: list[SimReplica] = []
        self._records: list[Record] = []
        self._left = self._waiting = len(trace.calls)
        self._late = 0
        self._children = 0
        self._boot = 0
        self._start_router()
        for name in settings.names:
            self._join(name)

    def run(self) -> Run:
        """Until the last request has its answer."""
        pace = self._pace()
        self._schedule(pace, self._arrive)
        while self._left and self._agenda.step():
            pass
        replicas = [*self._past, *self.replicas()]
        repairs = sum(seat.wire.repairs for seat in self._seats.values())
        ended_s = self._agenda.now_s
        return run_of(self._trace, self._settings, self._records, replicas, ended_s, pace, repairs)

    def ttft_within_s(self, share: float, limit_s: float) -> float | None:
        """The TTFT that `share` of the requests stay within, decoding left out; None where that is
        not below the limit: then the run ends as soon as enough of them are late."""
        calls = len(self._trace.calls)
        allowed = calls - 1 - math.floor(share * (calls - 1))
        self._schedule(self._pace(), lambda call: self._await(self._arrive(call), limit_s))
        while self._waiting and self._late <= allowed and self._agenda.step():
            pass
        if self._late > allowed:
            return None
        reached_s = float(np.quantile([r.ttft_s or NEVER_S for r in self._records], share))
        return reached_s if reached_s <= limit_s else None  # it lies between two requests

    def replicas(self) -> list[SimReplica]:
        """Those that live."""
        return [seat.replica for seat in self._seats.values()]

    def _schedule(self, pace: float, arrive: Callable[[Call], object]) -> None:
        """The arrivals and what goes wrong."""
        start_s = self._agenda.now_s
        first_s = self._trace.calls[0].arrival_s
        for call in self._trace.calls:
            at_s = start_s + (call.arrival_s - first_s) * pace
            self._agenda.at(at_s, lambda call=call: arrive(call))
        for fault in self._settings.faults:
            self._agenda.at(start_s + fault.at_s, lambda fault=fault: self._break(fault))

    def _await(self, record: Record, limit_s: float) -> None:
        """Late is who has no token by then; who failed never will."""

        def look() -> None:
            self._late += not record.ttft_s

        self._agenda.after(limit_s, look)

    # The router

    def _start_router(self) -> None:
        policy = self._settings.policy
        config = RouterConfig(
            policy="least_load" if policy == CLAIRVOYANT else policy,
            split_min_tokens=self._settings.split_min_tokens,
        )
        self._fleet = Fleet(Expected.like(self._hello), self._agenda)
        self.brain = RouterBrain(
            self._fleet, config, self._agenda, random.Random(self._settings.seed)
        )
        self._splitter = SimSplitter(self.brain, config, self._settings.always_split, self._agenda)

    def _arrive(self, call: Call) -> Record:
        record = Record(call.tenant, self._agenda.now_s, call.prompt_tokens, call.output_tokens)
        self._records.append(record)
        self._children += 1
        prompt = prompt_ids(call, self._trace.block_tokens)
        request = EngineRequest(
            child=ChildId(self._children),
            prompt=tuple(prompt.tolist()),
            chain=chain(CLUSTER_KEY, self._namespace, TENANT_SALT, prompt.tobytes()),
            params=SamplingParams(
                max_tokens=max(1, call.output_tokens), seed=0, temperature=0.0, ignore_eos=True
            ),
            seed=0,
            eos_ids=frozenset(),
            tenant=call.tenant,
            arrival_s=self._agenda.now_s,
        )
        entry = _Open(call, record, request)
        if not self._hands_off(entry):
            self._place(entry, 1)
        return record

    def _hands_off(self, entry: _Open) -> bool:
        """Whether its prompt goes to one that computes it for another one."""
        if not self._settings.prefill:
            return False
        self._children += 1
        child = ChildId(self._children)
        job = self._splitter.begin(self._query(entry, 1), entry.request, child)
        if job is None:
            return False
        seat = self._seats[job.decision.replica]
        seat.computing[child] = entry, job
        seat.replica.submit(job.request)
        return True

    def _computed(self, entry: _Open, job: Job, output: ChildOutput | None) -> None:
        """Its blocks are in the store, or the replica died: then another one is asked, once."""
        entry.hand_off = self._splitter.end(job, output)
        if entry.hand_off is not None:
            entry.record.prefilled_by = entry.hand_off.prefill
        elif output is None and not entry.failed:
            entry.failed = frozenset((job.pair.prefill,))
            if self._hands_off(entry):
                return
        self._place(entry, 1)

    def _place(self, entry: _Open, attempt: int) -> None:
        answer = self.brain.decide(self._query(entry, attempt))
        if isinstance(answer, NoReplica):
            if answer.retry_after_s:
                self._agenda.after(RETRY_S, lambda: self._place(entry, attempt))
            else:
                self._refuse(entry)
            return
        entry.decision = answer
        entry.record.replica = answer.replica
        seat = self._seats[answer.replica]
        request = _routed(entry.request, self.brain.router_boot, answer.dispatch_seq)
        seat.open[request.child] = entry
        seat.replica.submit(request)

    def _refuse(self, entry: _Open) -> None:
        """No replica will ever have room for it."""
        entry.record.failed = True
        self._left -= 1
        self._waiting -= not entry.first_s

    def _query(self, entry: _Open, attempt: int) -> RouteQuery:
        request, call = entry.request, entry.call
        return RouteQuery(
            request_id=str(request.child),
            attempt=attempt,
            tenant=call.tenant,
            pool=self._pool,
            chain=request.chain,
            prompt_tokens=call.prompt_tokens,
            max_tokens=request.params.max_tokens,
            block_tokens=self._trace.block_tokens,
            itl_deadline_ms=self._settings.promised_ms,
            exclude=entry.failed,
            pin=self._foreseen(request),
            hand_off=entry.hand_off,
        )

    def _foreseen(self, request: EngineRequest) -> str | None:
        if self._settings.policy != CLAIRVOYANT:
            return None
        return most_able(self.replicas(), request, self._rng)

    def _on_output(self, replica: SimReplica, output: ChildOutput) -> None:
        seat = self._seats[replica.name]
        job = seat.computing.get(output.child)
        if job is not None:
            if output.finish is not None:
                del seat.computing[output.child]
                self._computed(*job, output if output.error is None else None)
            return
        entry = seat.open.get(output.child)
        if entry is None or entry.decision is None:
            return
        now_s, record, call = self._agenda.now_s, entry.record, entry.call
        ttft_ms = 1e3 * (now_s - record.arrival_s)
        if not entry.first_s and output.token_ids:
            entry.first_s = now_s
            self._waiting -= 1
            record.ttft_s = now_s - record.arrival_s
            record.cached_tokens = output.cached_tokens
            self.brain.first_token(
                entry.decision.decision_id, output.cached_tokens, call.prompt_tokens, ttft_ms
            )
        if output.finish is not None:
            del seat.open[output.child]
            record.e2e_s = now_s - record.arrival_s
            record.failed = output.error is not None
            self._left -= 1
            self._waiting -= not entry.first_s
            self.brain.finish(entry.decision.decision_id, _outcome(record, ttft_ms))

    # Replicas

    def _join(self, name: str) -> None:
        settings, tiers = self._settings, self._tiers()
        self._boot += 1
        replica = SimReplica(
            name,
            self._boot,
            settings.device,
            Scheduler(
                make_limits(self._hello, settings),
                partial(block_key, CLUSTER_KEY),
                tiers=tiers,
                eviction=settings.eviction,
            ),
            self._hello.digest,
            self._agenda,
            dict(settings.speeds).get(name, 1.0),
            settings.fast_forward,
            tiers,
        )
        replica.on_output = self._on_output
        rng = random.Random(self._rng.random())
        muted = name in settings.muted
        wire = Wire(
            replica, self._hello_of(name), self._fleet, self._agenda, settings.bus, rng, muted
        )
        self._seats[name] = _Seat(replica, wire)
        wire.join()

    def _hello_of(self, name: str) -> ReplicaHello:
        return structs.replace(self._hello, role=self._settings.role(name))

    def _tiers(self) -> SimTiers | None:
        """Those of a replica that begins its life: its own ones are empty."""
        settings, size = self._settings, self._trace.block_tokens
        if not settings.tiers:
            return None
        stores = [
            (tier, self._shared[tier] if tier.shared else Store(blocks_of(tier.tokens, size)))
            for tier in settings.tiers
        ]
        return SimTiers(stores, size * settings.device.kv_bytes_per_token, size, self._agenda)

    def _break(self, fault: Fault) -> None:
        if fault.what == "router":
            self._restart_router()
            return
        seat = self._seats.pop(fault.replica, None)
        lost = self._die(seat) if seat else []
        jobs = list(seat.computing.values()) if seat else []
        if fault.what in ("restart", "join"):
            self._join(fault.replica)
        for job in jobs:
            self._computed(*job, None)
        for entry in lost:
            self._move(entry)

    def _die(self, seat: _Seat) -> list[_Open]:
        """The requests that were lost with it."""
        seat.replica.die()
        self._past.append(seat.replica)
        seat.wire.lose()
        return list(seat.open.values())

    def _move(self, entry: _Open) -> None:
        """A request whose replica died is asked for elsewhere, from its start."""
        assert entry.decision is not None
        failed = Outcome("transport", True, 0, entry.call.prompt_tokens, 0)
        self.brain.finish(entry.decision.decision_id, failed)
        self._place(entry, 2)

    def _restart_router(self) -> None:
        """A router that knows nothing: hellos, loads and snapshots come again."""
        self._start_router()
        for name, seat in self._seats.items():
            muted = name in self._settings.muted
            rng = random.Random(self._rng.random())
            seat.wire.retire()
            hello, bus = self._hello_of(name), self._settings.bus
            seat.wire = Wire(seat.replica, hello, self._fleet, self._agenda, bus, rng, muted)
            seat.wire.join()

    def _pace(self) -> float:
        """What the trace's times are multiplied with, so that the load is the one asked for."""
        settings, trace = self._settings, self._trace
        if settings.load is None:
            return 1.0
        work_s = 1e-3 * sum(
            settings.device.service_ms(call.prompt_tokens, call.output_tokens)
            for call in trace.calls
        )
        return work_s / (settings.load * len(settings.names) * trace.span_s)


def _routed(request: EngineRequest, router_boot: str, dispatch_seq: int) -> EngineRequest:
    """The request as this router's dispatch."""
    return replace(request, router_boot=router_boot, dispatch_seq=dispatch_seq)


def _outcome(record: Record, e2e_ms: float) -> Outcome:
    return Outcome(
        "error" if record.failed else "ok",
        False,
        record.cached_tokens,
        record.prompt_tokens,
        record.output_tokens,
        1e3 * record.ttft_s,
        e2e_ms,
    )
