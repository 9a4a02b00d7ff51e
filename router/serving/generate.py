"""The two generating routes: from the body's bytes to the last byte of the answer.

Everything that a request holds (tokens at the gate, reservations, attempts) is held by its visit, a
context manager, so a client that leaves at any stage, which cancels the handler, releases all of
it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from events.errors import CoreError, UserError
from router.backends.attempt import ForeignChosenError
from router.backends.relay import RelayCall
from router.dispatch.failover import Run
from router.dispatch.job import Job
from router.errors import REFUSED
from router.fleet.pool import Pool
from router.openai.badwords import Encode
from router.openai.chat import ChatCollector, ChatStream
from router.openai.completions import CompletionCollector, CompletionStream
from router.openai.logprobs import TokenTexts
from router.openai.parse import parse_chat, parse_completion
from router.openai.progress import Progress
from router.openai.sampling import to_sampling
from router.openai.schema import ChatRequest, CompletionRequest, Limits
from router.openai.stream import EventStream, ReplyHead, new_head
from router.randomness import random_bytes
from router.rendering.render import RenderedPrompt, Renderer
from router.revisions.mirror import Make
from router.revisions.revisions import Revision
from router.services import Services, limits_in
from router.serving.answers import Answers
from router.serving.http import Answer, Request, request_id
from router.serving.lane import json_answer
from router.serving.patience import Comments
from router.serving.pump import Pump
from router.serving.sse import EventWriter, Outbox, ReaderGoneError
from router.tenancy.admit import Visit
from router.tenancy.degrade import Asked
from router.tenancy.tenants import Tenant
from router.waiting.queue import Patience

FOREVER_S = 86_400.0
DRAIN_RETRY_S = 5.0

Respond = Callable[[], Awaitable[Answer]]


class Route(NamedTuple):
    """What the two routes do differently. `parse` and `render` raise UserError. `prefix`: of ids of
    answers; `remembers`: these may come back in the next request."""

    parse: Callable[[bytes, Limits], Any]
    render: Callable[[Renderer, Any, str], Awaitable[list[RenderedPrompt]]]
    stream: Callable[[ReplyHead, Any, TokenTexts], EventStream]
    collector: Callable[[ReplyHead, Any, TokenTexts], ChatCollector | CompletionCollector]
    prefix: str
    remembers: bool


async def _render_chat(renderer: Renderer, asked: ChatRequest, tenant: str) -> list[RenderedPrompt]:
    return [await renderer.chat(asked.messages, asked.tools, tenant=tenant)]


async def _render_prompts(
    renderer: Renderer, asked: CompletionRequest, tenant: str
) -> list[RenderedPrompt]:
    return [await renderer.prompt(prompt, tenant=tenant) for prompt in asked.prompts]


CHAT = Route(parse_chat, _render_chat, ChatStream, ChatCollector, "chatcmpl", True)
COMPLETION = Route(
    parse_completion, _render_prompts, CompletionStream, CompletionCollector, "cmpl", False
)


def _mint_seed() -> int:
    return int.from_bytes(random_bytes(8), "little") >> 2


class Prepared(Struct, frozen=True):
    """A request as one revision of the model takes it. `make` makes it once more, for a mirror."""

    revision: Revision
    tenant: Tenant
    body: bytes
    asked: Any
    jobs: Sequence[Job]
    make: Make | None = None

    def call(self, request: Request) -> RelayCall:
        """As a backend of another kind would get it."""
        return RelayCall(
            path=request.path,
            body=self.body,
            request_id=request_id(request),
            tag=self.tenant.tag,
            stream=self.asked.stream,
            wants_usage=self.asked.include_usage,
        )


class Generator:
    """Handlers of POST /v1/chat/completions and /v1/completions."""

    def __init__(self, services: Services) -> None:
        self._of = services
        self._settings = services.config.router
        self._outbox = Outbox()
        self.chat = partial(self._generate, CHAT)
        """POST /v1/chat/completions."""
        self.completions = partial(self._generate, COMPLETION)
        """POST /v1/completions; several prompts are several runs."""

    async def _generate(self, route: Route, request: Request) -> Answer:
        tenant = self._let_in(request)
        with self._of.admitter.enter(request, tenant) as visit:
            body = self._of.bodies.at_once(request)
            if body is None:
                body = await self._of.bodies.read(request)
            prepared = await self._prepare(request, tenant, body, route)
            asked, revision = prepared.asked, prepared.revision
            head = new_head(route.prefix, asked.model, revision.fingerprint)
            kind, respond = (
                (route.stream, self._stream) if asked.stream else (route.collector, self._collect)
            )
            reply = kind(head, asked, revision.texts)
            response = await respond(request, visit, prepared, reply)
            if route.remembers:
                self._remember(prepared.tenant, revision, reply.progress)
            return response

    def _let_in(self, request: Request) -> Tenant:
        """Whose it is. Raises UserError (401, 503)."""
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
        return self._of.gate.authenticate(request.headers)

    def _degrade(
        self,
        request: Request,
        tenant: Tenant,
        asked: Asked,
        prompts: Sequence[RenderedPrompt],
        limits: Limits,
    ) -> tuple[Asked, Tenant]:
        """Backends of other kinds get the body as it came, so nothing is changed for them."""
        if self._of.dispatcher.backends or not tenant.policy.degrade:
            return asked, tenant
        room_tokens = limits.context_tokens - max(prompt.tokens for prompt in prompts)
        return self._of.admitter.degrade(request, tenant, asked, room_tokens)

    async def _prepare(
        self, request: Request, tenant: Tenant, body: bytes, route: Route
    ) -> Prepared:
        """By the revision whose turn it is. What that one can't take goes to the main one."""
        revisions = self._of.revisions
        if not revisions.others:
            return await self._make(request, tenant, body, route, revisions.main)
        make = partial(self._make, request, tenant, body, route)
        asked = route.parse(body, revisions.main.widest)
        live = revisions.of(tenant.name, asked)
        if live is not revisions.main:
            try:
                prepared = await make(live)
            except UserError:
                live = revisions.main
        if live is revisions.main:
            prepared = await make(live)
        again = partial(make, live=False) if revisions.may_mirror(asked) else None
        return replace(prepared, make=again)

    async def _make(
        self,
        request: Request,
        tenant: Tenant,
        body: bytes,
        route: Route,
        revision: Revision,
        *,
        live: bool = True,
    ) -> Prepared:
        pool = self._of.jobs.pool(revision.name)
        limits = limits_in(revision.widest, pool)
        asked = route.parse(body, limits)
        prompts = await route.render(revision.renderer, asked, tenant.name)
        if live:
            asked, tenant = self._degrade(request, tenant, asked, prompts, limits)
        encode = revision.card.tokenizer.encode
        jobs = self._jobs(request_id(request), tenant, asked, prompts, limits, pool, encode)
        return Prepared(revision, tenant, body, asked, jobs)

    def _jobs(
        self,
        own_id: str,
        tenant: Tenant,
        asked: ChatRequest | CompletionRequest,
        prompts: Sequence[RenderedPrompt],
        limits: Limits,
        pool: Pool | None,
        encode: Encode,
    ) -> list[Job]:
        jobs, room = [], limits.context_tokens
        for number, prompt in enumerate(prompts):
            sampling = to_sampling(asked, prompt.tokens, room, _mint_seed, encode)
            jobs.append(
                self._of.jobs.make(
                    f"{own_id}-{number}", tenant, prompt.ids, sampling, pool, model=asked.model
                )
            )
        return jobs

    async def _stream(
        self, request: Request, visit: Visit, prepared: Prepared, reply: EventStream
    ) -> Answer:
        """Wait for its turn, then answer. Raises UserError while nothing was sent."""
        settings, metrics = self._settings, self._of.metrics
        writer = EventWriter(request, self._outbox, settings.slow_reader_s)
        # A backend's answer has a head of its own: where one may come, ours can't go before it.
        alone = not prepared.revision.dispatcher.backends
        comments = Comments(writer, settings.keepalive_s) if alone else None
        try:
            answers = await self._place(visit, prepared, comments)
            pump = Pump(writer, answers, reply, metrics, settings.keepalive_s)
            return await self._reply(request, prepared, answers, pump.respond)
        except UserError as error:
            if not writer.response.prepared:
                raise
            metrics.stream_error(REFUSED)
            await writer.fail(reply.fail(error.error))
        except ReaderGoneError as error:
            metrics.stream_error(error.reason)
        return writer.response

    async def _place(
        self, visit: Visit, prepared: Prepared, patience: Patience | None = None
    ) -> Answers:
        """Admit all prompts of the request or none; nothing is sent before the first `next`."""
        of, retries = self._of, self._settings.retries
        jobs, revision, whole = prepared.jobs, prepared.revision, not prepared.asked.stream
        admission = await of.admitter.admit(visit, prepared.tenant, jobs, patience)
        grow, dispatcher = admission.grow, revision.dispatcher
        if prepared.make is not None:
            of.mirror.offer(revision, prepared.make)
        if len(jobs) > 1 and not of.links.up():
            # A backend takes a body with all its prompts at once, or not at all.
            jobs = jobs[:1]
        may_relay = len(jobs) == 1
        timely = [job.after(admission.waited_s) for job in jobs]
        runs = [Run(job, dispatcher, of.budget, retries, whole, grow, may_relay) for job in timely]
        answers = visit.answers = Answers(runs, revision.name)
        return answers

    def _reply(
        self, request: Request, prepared: Prepared, answers: Answers, ours: Respond
    ) -> Awaitable[Answer]:
        """From deltas of our own replicas (`ours`), or from the bytes of a backend where there are
        any."""
        if not prepared.revision.dispatcher.backends:
            return ours()
        return self._reply_of_any(request, prepared, answers, ours)

    async def _reply_of_any(
        self, request: Request, prepared: Prepared, answers: Answers, ours: Respond
    ) -> Answer:
        """Of whoever is chosen, until one has begun to answer."""
        while True:
            try:
                return await ours()
            except ForeignChosenError:
                relay, run = self._of.backends.relay, answers.runs[0]
                call, headers = prepared.call(request), answers.headers()
                response = await relay.answer(request, call, run, headers)
                if response is not None:
                    return response

    async def _collect(
        self,
        request: Request,
        visit: Visit,
        prepared: Prepared,
        reply: ChatCollector | CompletionCollector,
    ) -> Answer:
        """Wait for its turn, then for the whole answer. Raises UserError."""
        answers = await self._place(visit, prepared)

        async def whole() -> Answer:
            while not answers.done:
                for number, delta in await answers.next(FOREVER_S):
                    reply.feed(delta, number)
            return json_answer(request, reply.body(), answers.headers())

        return await self._reply(request, prepared, answers, whole)

    def _remember(self, tenant: Tenant, revision: Revision, progress: Progress) -> None:
        """Keep the generated turns, so that the next request hits the cache with their ids."""
        if progress.error is not None or not progress.done:
            return
        ends = revision.card.eos_ids
        for choice in progress.choices:
            ids = choice.token_ids
            while ids and ids[-1] in ends:
                ids = ids[:-1]
            revision.renderer.remember(tenant.name, choice.text, ids)
