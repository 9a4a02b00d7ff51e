"""The two generating routes: from the body's bytes to the last byte of the answer.

Everything that a request holds (tokens at the gate, reservations, attempts) is held by context
managers, so a client that leaves at any stage, which cancels the handler, releases all of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack

from aiohttp import web

from events.errors import CoreError, UserError
from router.answers import Answers
from router.backends.attempt import ForeignChosenError
from router.backends.relay import RelayCall
from router.degrade import Asked
from router.dispatch import Job
from router.failover import Run
from router.fleet import Pool
from router.http import request_id
from router.openai.chat import ChatCollector, ChatStream
from router.openai.completions import CompletionCollector, CompletionStream
from router.openai.parse import parse_chat, parse_completion
from router.openai.progress import Progress
from router.openai.sampling import to_sampling
from router.openai.schema import ChatRequest, CompletionRequest, Limits
from router.openai.stream import EventStream, new_head
from router.pump import Pump
from router.render import RenderedPrompt
from router.services import Services
from router.sse import EventWriter, Outbox
from router.tenants import Tenant

FOREVER_S = 86_400.0
DRAIN_RETRY_S = 5.0


def _mint_seed() -> int:
    return secrets.randbits(62)


def _call(
    request: web.Request, tenant: Tenant, asked: ChatRequest | CompletionRequest, body: bytes
) -> RelayCall:
    """The request as a backend of another kind would get it."""
    return RelayCall(
        path=request.path,
        body=body,
        request_id=request_id(request),
        tag=tenant.tag,
        stream=asked.stream,
        wants_usage=asked.include_usage,
    )


class Generator:
    """Handlers of POST /v1/chat/completions and /v1/completions."""

    def __init__(self, services: Services) -> None:
        self._of = services
        self._model = services.config.model.name
        self._fingerprint = f"fp_{services.card.weights_fingerprint[:10]}"
        self._settings = services.config.router
        self._outbox = Outbox()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        with ExitStack() as held:
            tenant, body = await self._enter(request, held)
            pool = self._of.jobs.pool()
            limits = self._of.limits(pool)
            asked = parse_chat(body, limits)
            prompt = await self._of.renderer.chat(asked.messages, asked.tools, tenant=tenant.name)
            asked, tenant = self._degrade(request, tenant, asked, [prompt], limits)
            jobs = self._jobs(request, tenant, asked, [prompt], limits, pool)
            answers = await self._place(held, tenant, jobs, whole=not asked.stream)
            kind = ChatStream if asked.stream else ChatCollector
            head = new_head("chatcmpl", self._model, self._fingerprint)
            reply = kind(head, asked, self._of.texts)
            call = _call(request, tenant, asked, body)
            response = await self._reply(request, answers, reply, call)
            self._remember(tenant, reply.progress)
            return response

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions; several prompts are several runs."""
        with ExitStack() as held:
            tenant, body = await self._enter(request, held)
            pool = self._of.jobs.pool()
            limits = self._of.limits(pool)
            asked = parse_completion(body, limits)
            render = self._of.renderer.prompt
            prompts = [await render(prompt, tenant=tenant.name) for prompt in asked.prompts]
            asked, tenant = self._degrade(request, tenant, asked, prompts, limits)
            jobs = self._jobs(request, tenant, asked, prompts, limits, pool)
            answers = await self._place(held, tenant, jobs, whole=not asked.stream)
            kind = CompletionStream if asked.stream else CompletionCollector
            head = new_head("cmpl", self._model, self._fingerprint)
            reply = kind(head, asked, self._of.texts)
            call = _call(request, tenant, asked, body)
            return await self._reply(request, answers, reply, call)

    async def _enter(self, request: web.Request, held: ExitStack) -> tuple[Tenant, bytes]:
        if self._of.lifecycle.draining:
            raise UserError(
                CoreError(
                    status=503,
                    message="this gateway is shutting down",
                    type="server_error",
                    code="draining",
                    retry_after_s=DRAIN_RETRY_S,
                )
            )
        tenant = self._of.gate.authenticate(request.headers)
        self._of.admitter.enter(held, request, tenant)
        return tenant, await self._of.bodies.read(request)

    def _degrade(
        self,
        request: web.Request,
        tenant: Tenant,
        asked: Asked,
        prompts: Sequence[RenderedPrompt],
        limits: Limits,
    ) -> tuple[Asked, Tenant]:
        """Backends of other kinds get the body as it came, so nothing is changed for them."""
        if self._of.dispatcher.backends:
            return asked, tenant
        room_tokens = limits.context_tokens - max(prompt.tokens for prompt in prompts)
        return self._of.admitter.degrade(request, tenant, asked, room_tokens)

    def _jobs(
        self,
        request: web.Request,
        tenant: Tenant,
        asked: ChatRequest | CompletionRequest,
        prompts: Sequence[RenderedPrompt],
        limits: Limits,
        pool: Pool | None,
    ) -> list[Job]:
        jobs = []
        for number, prompt in enumerate(prompts):
            sampling = to_sampling(asked, prompt.tokens, limits.context_tokens, _mint_seed)
            own_id = f"{request_id(request)}-{number}"
            jobs.append(self._of.jobs.make(own_id, tenant, prompt.ids, sampling, pool))
        return jobs

    async def _place(
        self, held: ExitStack, tenant: Tenant, jobs: Sequence[Job], whole: bool
    ) -> Answers:
        """Admit all prompts of the request or none; nothing is sent before the first `next`."""
        of, retries = self._of, self._settings.retries
        admission = await of.admitter.admit(held, tenant, jobs)
        grow = admission.grow
        if len(jobs) > 1 and not of.links.up():
            # A backend takes a body with all its prompts at once, or not at all.
            jobs = jobs[:1]
        may_relay = len(jobs) == 1
        timely = [job.after(admission.waited_s) for job in jobs]
        runs = [
            Run(job, of.dispatcher, of.budget, retries, whole, grow, may_relay) for job in timely
        ]
        return held.enter_context(Answers(runs))

    async def _reply(
        self,
        request: web.Request,
        answers: Answers,
        reply: EventStream | ChatCollector | CompletionCollector,
        call: RelayCall,
    ) -> web.StreamResponse:
        """From deltas of our own replicas or from the bytes of a backend: whoever is chosen, until
        one has begun to answer."""
        while True:
            try:
                return await self._answer(request, answers, reply)
            except ForeignChosenError:
                relay, run = self._of.backends.relay, answers.runs[0]
                response = await relay.answer(request, call, run, answers.headers())
                if response is not None:
                    return response

    async def _answer(
        self,
        request: web.Request,
        answers: Answers,
        reply: EventStream | ChatCollector | CompletionCollector,
    ) -> web.StreamResponse:
        if isinstance(reply, EventStream):
            return await self._stream(request, answers, reply)
        while not answers.done:
            for number, delta in await answers.next(FOREVER_S):
                reply.feed(delta, number)
        headers = answers.headers()
        return web.Response(body=reply.body(), headers=headers, content_type="application/json")

    async def _stream(
        self, request: web.Request, answers: Answers, reply: EventStream
    ) -> web.StreamResponse:
        writer = EventWriter(request, self._outbox, self._settings.slow_reader_s)
        keepalive_s = self._settings.keepalive_s
        return await Pump(writer, answers, reply, self._of.metrics, keepalive_s).respond()

    def _remember(self, tenant: Tenant, progress: Progress) -> None:
        """Keep the generated turns, so that the next request hits the cache with their ids."""
        if progress.error is not None or not progress.done:
            return
        for choice in progress.choices:
            ids = list(choice.token_ids)
            while ids and ids[-1] in self._of.card.eos_ids:
                ids.pop()
            self._of.renderer.remember(tenant.name, choice.text, ids)
