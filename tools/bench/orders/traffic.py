"""Who asks for what of one replica: a trace's requests, given to tenants and classes at random.

Traces say neither whose a request is nor when it is due. Half of all requests here are one
tenant's, the rest that of others; each is interactive, standard or batch. It is due after a time
that its class allows, and a multiple of what its prompt takes alone and cold.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from events.request import SamplingParams
from kvstore.identity import Namespace, chain
from replica.engine.messages import EngineRequest
from replica.sched.plan import ChildId
from tools.sim.call import Trace
from tools.sim.clock import START_S
from tools.sim.profiles import Device
from tools.sim.prompt import CLUSTER_KEY, TENANT_SALT, prompt_ids

TENANTS = {"large": 0.5, "a": 0.2, "b": 0.2, "c": 0.1}
"""Shares of the requests."""


@dataclass(frozen=True, slots=True)
class Kind:
    """`due_s` and `due_prefills` (cold ones of the request itself) allow for the first token."""

    name: str
    share: float
    priority: int
    due_s: float
    due_prefills: float


KINDS = (
    Kind("interactive", 0.5, 1, 0.5, 2.0),
    Kind("standard", 0.35, 0, 4.0, 4.0),
    Kind("batch", 0.15, -100, 60.0, 10.0),
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, its kind, and the delay after which its first token is late."""

    request: EngineRequest
    kind: Kind
    due_s: float


def traffic(
    trace: Trace, device: Device, namespace: Namespace, load: float, seed: int
) -> Iterator[Arrival]:
    """The trace at `load` times what one replica could serve without any cache."""
    rng = random.Random(seed)
    work_s = 1e-3 * sum(
        device.service_ms(call.prompt_tokens, call.output_tokens) for call in trace.calls
    )
    pace = work_s / (load * max(1e-9, trace.span_s))
    first_s = trace.calls[0].arrival_s
    for number, call in enumerate(trace.calls, 1):
        (tenant,) = rng.choices(list(TENANTS), list(TENANTS.values()))
        (kind,) = rng.choices(KINDS, [kind.share for kind in KINDS])
        alone_s = 1e-3 * device.prefill.predict_ms(0, call.prompt_tokens)
        due_s = kind.due_s + kind.due_prefills * alone_s
        at_s = START_S + (call.arrival_s - first_s) * pace
        prompt = prompt_ids(call, trace.block_tokens)
        request = EngineRequest(
            child=ChildId(number),
            prompt=tuple(prompt.tolist()),
            chain=chain(CLUSTER_KEY, namespace, TENANT_SALT, prompt.tobytes()),
            params=SamplingParams(
                max_tokens=max(1, call.output_tokens), seed=0, temperature=0.0, ignore_eos=True
            ),
            seed=0,
            eos_ids=frozenset(),
            tenant=tenant,
            arrival_s=at_s,
            priority=kind.priority,
            first_by_s=at_s + due_s,
        )
        yield Arrival(request, kind, due_s)
