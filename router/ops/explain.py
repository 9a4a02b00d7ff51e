"""What the router would do now with a prompt that nobody sends: numbers only, never the prompt."""

from __future__ import annotations

from math import isfinite
from typing import Any

import msgspec
from msgspec.structs import replace

from events.decision import RouteDecision
from events.errors import UserError
from events.wire import plain
from router.choice.route import HandOff, NoReplica, RouteQuery
from router.dispatch.job import Job
from router.openai import faults
from router.openai.parse import read_chat, read_completion
from router.openai.sampling import to_sampling
from router.openai.schema import ChatRequest, CompletionRequest, Limits
from router.rendering.render import RenderedPrompt, Renderer
from router.services import Services, limits_in
from router.split.hand_off import SPLIT
from router.tenancy.tenants import Tenant

REQUEST_ID = "explain"


class Explainer:
    """The way of a generating request up to the choice, and not a step further."""

    def __init__(self, services: Services) -> None:
        self._of = services

    async def explain(self, tenant: Tenant, document: dict[str, Any]) -> dict[str, Any]:
        """`document` is a body of a generating route, whose model may be left out. Raises UserError
        as that route would before it chooses."""
        asked = self._read(document, self._of.limits(self._of.jobs.pool()))
        revision = self._of.revisions.of(tenant.name, asked)
        pool = self._of.jobs.pool(revision.name)
        limits = limits_in(revision.widest, pool)
        prompt = await self._render(revision.renderer, tenant, asked)
        sampling = to_sampling(asked, prompt.tokens, limits.context_tokens, lambda: 0)
        job = self._of.jobs.make(REQUEST_ID, tenant, prompt.ids, sampling, pool, model=asked.model)
        job, query = revision.dispatcher.placing(job, job.first_leg())
        hand_off, query = self._hand_off(query)
        verdict = self._of.brain.explain(query)
        head = {**_asked(job), "revision": revision.name, "hand_off": hand_off}
        return {**head, "policy": self._of.brain.policy, **_answer(verdict)}

    def _hand_off(self, query: RouteQuery) -> tuple[dict[str, Any] | None, RouteQuery]:
        """Who would compute the prompt for another one to answer, or why nobody; and the query as
        it would be asked then. None where nobody has such a role."""
        pairing = self._of.splitter.pairing
        if not pairing.splits(query.pool):
            return None, query
        planned = pairing.plan(query)
        if isinstance(planned, str):
            return {"verdict": planned}, replace(query, hand_off=HandOff(planned))
        done = HandOff(SPLIT, planned.prefill, planned.store, planned.blocks, planned.prefill_ms)
        terms = {
            "verdict": SPLIT,
            "prefill": planned.prefill,
            "blocks": planned.blocks,
            "prefill_ms": planned.prefill_ms,
            "fetch_ms": planned.fetch_ms,
            "split_ms": planned.split_ms,
            "colocated_ms": planned.colocated_ms if isfinite(planned.colocated_ms) else None,
        }
        return terms, replace(query, hand_off=done)

    def _read(self, document: dict[str, Any], limits: Limits) -> ChatRequest | CompletionRequest:
        body = {"model": self._of.config.model.name, **document}
        if "prompt" not in body:
            return read_chat(body, limits)
        completion = read_completion(body, limits)
        if len(completion.prompts) > 1:
            raise _several()
        return completion

    async def _render(
        self, renderer: Renderer, tenant: Tenant, asked: ChatRequest | CompletionRequest
    ) -> RenderedPrompt:
        if isinstance(asked, ChatRequest):
            return await renderer.chat(asked.messages, asked.tools, tenant=tenant.name)
        return await renderer.prompt(asked.prompts[0], tenant=tenant.name)


def _several() -> UserError:
    return faults.invalid_value("prompt", "one prompt at a time can be explained")


def _asked(job: Job) -> dict[str, Any]:
    return {
        "tenant": job.tenant,
        "pool": job.pool,
        "prompt_tokens": job.prompt_tokens,
        "max_tokens": job.sampling.max_tokens,
        "block_tokens": job.block_tokens,
        "prompt_blocks": len(job.chain),
        "public_blocks": job.public_cut_blocks,
    }


def _answer(verdict: RouteDecision | NoReplica) -> dict[str, Any]:
    """`replica` is null where nobody could take it. `candidates` holds the best and who was
    filtered out, `overlap_blocks` being the blocks matched on each."""
    candidates = msgspec.to_builtins(verdict.candidates, enc_hook=plain)
    if isinstance(verdict, NoReplica):
        return {
            "replica": None,
            "reason": verdict.reason,
            "retry_after_s": verdict.retry_after_s,
            "candidates": candidates,
        }
    return {
        "replica": verdict.replica,
        "reason": verdict.reason,
        "matched_tokens": verdict.matched_tokens,
        "usable_tokens": verdict.usable_tokens,
        "predicted_cached_tokens": verdict.predicted_cached_tokens,
        "predicted_ttft_ms": verdict.predicted_ttft_ms,
        "decided_us": verdict.decided_us,
        "candidates": candidates,
    }
