"""The front over the real engine thread: many requests, cancelled and cut off at every stage."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from configs.schema import ReplicaConfig
from events.request import Abort, CoreRequest, Hold, Resume
from replica.engine.loop import EngineThread
from replica.front.output import StepQueue
from replica.front.stream import TokenStream
from tests.fakes.runner import FakeRunner, next_token
from tests.fakes.vocabulary import END_ID, ByteVocabulary
from tests.replica.front.rig import CLUSTER_KEY, LAYOUT, Rig, RouterEnd, request, rig
from tests.waiting import until

VOCAB = 256


class Engines:
    """Makes one engine over a fake runner, and closes it."""

    def __init__(self, blocks: int = 64) -> None:
        self.runner = FakeRunner(blocks, LAYOUT.block_tokens, VOCAB, eos=END_ID)
        self.engine: EngineThread | None = None

    def __call__(self, queue: StepQueue) -> EngineThread:
        config = ReplicaConfig(
            id="replica-0", context_tokens=128, max_running=8, max_step_tokens=24
        )
        self.engine = EngineThread(self.runner, queue, config, CLUSTER_KEY, check=True)
        self.engine.start()
        return self.engine


@contextmanager
def engines(blocks: int = 64) -> Iterator[Engines]:
    made = Engines(blocks)
    yield made
    if made.engine is not None:
        made.engine.close()
        assert made.engine.load().broken_invariants == 0


def expected(asked: CoreRequest) -> tuple[str, tuple[int, ...], str]:
    """Text, ids and reason of a greedy answer, computed without an engine."""
    tokens = asked.token_ids().tolist()
    params = asked.sampling
    stream = TokenStream(ByteVocabulary((b"own f", b"ox")), params.stop)
    reason = "length"
    for _ in range(params.max_tokens):
        token = next_token(tokens, VOCAB, END_ID)
        if token == END_ID:
            reason = "stop"
            break
        tokens.append(token)
        if not stream.push(token):
            reason = "stop"
            break
    piece = stream.finish()
    return piece.text, piece.token_ids, "stop" if stream.stopped_by else reason


def some_request(rng: random.Random, number: int) -> CoreRequest:
    head = [rng.choice((1, 2))] * rng.randrange(0, 24)
    return request(
        f"r{number}",
        [*head, *rng.choices(range(VOCAB), k=rng.randrange(1, 12))],
        max_tokens=rng.randrange(1, 40),
        temperature=0.0,
        n=rng.randrange(1, 4),
        stop=tuple(rng.choices("abcdefgh", k=rng.randrange(3))),
    )


async def meddle(rng: random.Random, router: RouterEnd, name: str) -> None:
    """Nothing, a cancellation, or a pause."""
    match rng.randrange(4):
        case 0:
            await router.send(Abort(request_id=name, attempt=1))
        case 1:
            await router.send(Hold(request_id=name, attempt=1))
            await asyncio.sleep(0)
            await router.send(Resume(request_id=name, attempt=1))


async def check(router: RouterEnd, asked: CoreRequest) -> str:
    """All children end once; what they said is the expected answer, or its beginning."""
    text, ids, reason = expected(asked)
    for child in range(asked.sampling.n):
        answer = await router.answer(asked.request_id, child=child)
        if answer.finish.reason == "abort":
            assert ids[: len(answer.token_ids)] == answer.token_ids
        else:
            assert (answer.text, answer.token_ids, answer.finish.reason) == (text, ids, reason)
            usage = answer.deltas[-1].usage
            assert usage.cached_tokens < usage.prompt_tokens == len(asked.token_ids())
    return answer.finish.reason


async def settled(front: Rig, engine: EngineThread) -> None:
    """Both hops are empty, and every block is free or cached."""
    await until(front.empty)
    await until(lambda: engine.open_children() == 0)
    await until(lambda: engine.load().running + engine.load().waiting == 0)
    load = engine.load()
    assert load.free_blocks + load.cached_blocks == load.total_blocks


@pytest.mark.parametrize("seed", range(4))
async def test_O1_chaos_leaves_right_answers_and_empty_tables(seed: int) -> None:
    rng = random.Random(seed)
    with engines() as made:
        async with rig(engine_over=made) as front:
            routers = [await front.dial() for _ in range(3)]
            asked: list[tuple[RouterEnd, CoreRequest]] = []
            for number in range(30):
                router = routers[number % 3]
                one = some_request(rng, number)
                asked.append((router, one))
                await router.send(one)
                await meddle(rng, router, f"r{rng.randrange(number + 1)}")
            routers[2].socket._response.connection.transport.abort()
            reasons = [
                await check(router, one) for router, one in asked if router is not routers[2]
            ]
            assert len(reasons) == 20
            assert made.engine is not None
            await settled(front, made.engine)


async def test_O1_requests_that_wait_in_the_queue_are_cancelled_too() -> None:
    with engines(blocks=16) as made:
        async with rig(engine_over=made) as front:
            router = await front.dial()
            for number in range(40):
                await router.send(request(f"r{number}", [number] * 20, max_tokens=40))
            router.socket._response.connection.transport.abort()
            await until(lambda: len(front.front.attempts) == 0)
            assert made.engine is not None
            await settled(front, made.engine)


async def test_a_dead_engine_ends_its_requests_and_shows_in_health() -> None:
    with engines() as made:
        async with rig(engine_over=made) as front:
            made.runner.faults.always = True
            router = await front.dial()
            for number in range(4):
                await router.send(request(f"r{number}", [number] * 9))
            for number in range(4):
                answer = await router.answer(f"r{number}")
                assert (answer.finish.reason, answer.finish.error.status) == ("error", 500)
            assert made.engine is not None
            made.engine.close()
            assert (await front.get("/health"))[0] == 503
            await router.send(request("after"))
            assert (await router.answer("after")).finish.reason == "error"


async def test_a_prompt_that_is_only_computed_ends_without_a_token() -> None:
    with engines() as made:
        async with rig(engine_over=made) as front:
            router = await front.dial()
            await router.send(request(prompt=(1,) * 12, max_tokens=1, write_to="nowhere"))
            answer = await router.answer()
            assert (answer.text, answer.token_ids, answer.finish.reason) == ("", (), "length")
            assert answer.finish.written_blocks == 0
            assert answer.deltas[-1].usage.prompt_tokens == 12
