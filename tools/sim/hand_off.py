"""Prompts computed by one simulated replica for another one: the router's own pairs, no waiting.

What becomes of a hand-off that can't be carried out is what becomes of it in the gateway: another
one is asked once where its replica died, else the one that answers computes the prompt.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

from msgspec import structs

from configs.schema import RouterConfig
from events.decision import RouteDecision
from events.request import SamplingParams
from kvstore.identity import KEY_BYTES, KeyChain
from replica.engine.messages import ChildOutput, EngineRequest
from replica.sched.plan import ChildId
from router.choice.choose import RouterBrain
from router.choice.route import HandOff, NoReplica, Outcome, RouteQuery
from router.split.pairing import Pair, Pairing, prefill_query
from router.split.quota import DecodeQuota
from tools.sim.clock import Agenda

NO_ANSWER = SamplingParams(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt on its way: where it was sent, as what, since when, and for whom there is room."""

    pair: Pair
    decision: RouteDecision
    request: EngineRequest
    began_s: float
    pledge: ExitStack


class SimSplitter:
    """Of one life of a router."""

    def __init__(
        self, brain: RouterBrain, config: RouterConfig, always: bool, agenda: Agenda
    ) -> None:
        self.quota = DecodeQuota(brain.ledger, brain.peers, config.split_decode_share)
        self._pairing = Pairing(brain, self.quota, config.split_min_tokens, always)
        self._brain = brain
        self._agenda = agenda

    def begin(self, query: RouteQuery, request: EngineRequest, child: ChildId) -> Job | None:
        """The prompt as the one that computes it gets it, reserved there; None where it stays."""
        pair = self._pairing.plan(query)
        if not isinstance(pair, Pair):
            return None
        ask = structs.replace(prefill_query(query, pair.blocks), pin=pair.prefill)
        answer = self._brain.decide(ask)
        if isinstance(answer, NoReplica):
            return None
        pledge = ExitStack()
        pledge.enter_context(self.quota.pledge(pair.decode, pair.blocks))
        made = replace(
            request,
            child=child,
            prompt=request.prompt[: ask.prompt_tokens],
            chain=KeyChain(ask.chain.data[: pair.blocks * KEY_BYTES], b""),
            params=NO_ANSWER,
            write_to=pair.store,
            router_boot=self._brain.router_boot,
            dispatch_seq=answer.dispatch_seq,
        )
        return Job(pair, answer, made, self._agenda.now_s, pledge)

    def end(self, job: Job, output: ChildOutput | None) -> HandOff | None:
        """Its blocks are in the store, or it failed; without an output its replica died."""
        job.pledge.close()
        pair, took_ms = job.pair, 1e3 * (self._agenda.now_s - job.began_s)
        blocks = 0 if output is None else output.written_blocks
        cached = 0 if output is None else output.cached_tokens
        status, fault = ("transport", True) if output is None else ("ok", False)
        outcome = Outcome(status, fault, cached, job.decision.prompt_tokens, 0, took_ms, took_ms)
        self._brain.finish(job.decision.decision_id, outcome)
        if not blocks:
            return None
        self._pairing.learn(pair.store, took_ms - pair.prefill_ms)
        return HandOff("split", pair.prefill, pair.store, blocks, took_ms)
