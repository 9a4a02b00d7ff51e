"""Two revisions of a model behind one name: who answers, who listens, and who loses its share."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from configs.model.card import ModelCard, load_card
from configs.schema import RevisionConfig
from events.errors import CoreError
from router.cluster.shared import REVISION
from router.fleet.expected import MAIN
from router.gateway import Gateway
from router.revisions import mirror
from router.revisions import revisions as module
from router.revisions.mirror import MIRROR_PRIORITY
from router.revisions.revisions import REVERTED, Share, _draw, encode_share
from router.revisions.watch import MIN_ATTEMPTS
from tests.fakes.replica import FakeReplica
from tests.fakes.scripts import echo, refuse, silent
from tests.fakes.tiny_model import write_tiny_gguf
from tests.router.gateway.house import ADMIN_KEY, CHAT, COMPLETION, House
from tests.waiting import until

BROKEN = CoreError(status=500, message="broken", type="server_error")


@pytest.fixture(scope="session")
def next_card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    """Other weights, and half the context."""
    path: Path = tmp_path_factory.mktemp("next") / "next.gguf"
    return load_card(write_tiny_gguf(path, seed=1, context=1024))


class Pair(House):
    """r0 serves the model, n0 its next revision."""

    def __init__(self, card: ModelCard, other: ModelCard, settings: dict[str, Any]) -> None:
        super().__init__(card, 1, {})
        revision = RevisionConfig(name="next", path="unused", **settings)
        self.config = msgspec.structs.replace(self.config, revisions=(revision,))
        self.revision_cards = {"next": other}
        self.replicas.append(self.new_replica("n0", model=other))

    @property
    def old(self) -> FakeReplica:
        return self.replicas[0]

    @property
    def next(self) -> FakeReplica:
        return self.replicas[1]

    async def say(self, http: aiohttp.ClientSession, text: str, **fields: Any) -> str:
        """Which revision answers a conversation that begins so."""
        messages = [{"role": "user", "content": text}, *fields.pop("more", [])]
        async with self.post(
            http, "/v1/chat/completions", {**CHAT, "messages": messages, **fields}
        ) as response:
            answer = await response.read()
            assert response.status == 200, answer
            return response.headers["x-warmroute-revision"]

    async def put(self, http: aiohttp.ClientSession, **body: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        url = f"{self.url}/router/revisions"
        async with http.put(url, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def report(self, http: aiohttp.ClientSession) -> dict[str, Any]:
        async with http.get(f"{self.url}/router/revisions") as response:
            return {of["revision"]: of for of in (await response.json())["revisions"]}


@pytest.fixture
async def pair(tiny_card: ModelCard, next_card: ModelCard) -> AsyncIterator[Callable]:
    """`await pair(weight=0.5)`."""
    async with AsyncExitStack() as stack:

        async def make(**settings: Any) -> Pair:
            house = Pair(tiny_card, next_card, settings)
            return await stack.enter_async_context(house)

        yield make


def test_draws_give_each_its_share_and_move_no_more_than_they_must() -> None:
    def winner(seed: int, share: float) -> str:
        weights = {MAIN: 1 - share, "next": share}
        return max(weights, key=lambda name: _draw(f"{seed}".encode(), name, weights[name]))

    before = {seed: winner(seed, 0.2) for seed in range(4_000)}
    after = {seed: winner(seed, 0.3) for seed in range(4_000)}
    assert 0.17 < Counter(before.values())["next"] / 4_000 < 0.23
    assert 0.27 < Counter(after.values())["next"] / 4_000 < 0.33
    assert all(after[seed] == "next" for seed, name in before.items() if name == "next")


async def test_conversations_are_shared_out_and_stay_where_they_began(
    pair: Callable, http: aiohttp.ClientSession
) -> None:
    house: Pair = await pair(weight=0.5)
    first = {text: await house.say(http, text) for text in map(str, range(24))}
    assert 4 <= Counter(first.values())["next"] <= 20
    assert len(house.next.calls) == Counter(first.values())["next"]
    turn = [{"role": "assistant", "content": "one"}, {"role": "user", "content": "and now?"}]
    for text, revision in first.items():
        assert await house.say(http, text, more=turn, stream=True) == revision
    assert {call.request.model for call in house.calls} == {"tiny"}
    report = await house.report(http)
    assert report["next"]["live"]["attempts"] == len(house.next.calls)
    assert (report["main"]["replicas"], report["next"]["replicas"]) == (1, 1)
    await house.settled()


async def test_R8_each_revision_gets_ids_and_keys_of_its_own(
    pair: Callable, http: aiohttp.ClientSession
) -> None:
    house: Pair = await pair(weight=1.0)
    text = "the same words for both of them, " * 8
    assert await house.say(http, text) == "next"
    assert house.old.calls == []
    pools = {pool.revision: pool for pool in house.fleet.pools().values()}
    assert pools["next"].namespace.weights == house.revision_cards["next"].weights_fingerprint
    assert pools["main"].namespace.weights == house.card.weights_fingerprint
    await house.put(http, revision="next", weight=0.0)
    async with house.post(
        http, "/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": text}]}
    ) as response:
        decision = response.headers["x-warmroute-decision"]
        answer = await response.json()
    record = house.services.brain.decisions.get(decision)
    assert record.decision.predicted_cached_tokens == 0
    assert answer["system_fingerprint"] == f"fp_{house.card.weights_fingerprint[:10]}"


async def test_what_a_revision_cant_take_and_token_ids_go_to_the_model(
    pair: Callable, http: aiohttp.ClientSession
) -> None:
    house: Pair = await pair(weight=1.0, mirror=1.0)
    assert await house.say(http, "short") == "next"
    assert await house.say(http, "a long story, " * 100) == "main"
    async with house.post(http, "/v1/completions", {**COMPLETION, "prompt": [5, 6, 7]}) as response:
        assert response.headers["x-warmroute-revision"] == "main"
    async with house.post(http, "/v1/chat/completions", {**CHAT, "messages": []}) as response:
        assert response.status == 400
    await until(lambda: not len(house.services.mirror))
    assert len(house.next.calls) == 1, "ids mean nothing there, and the story is too long"


async def test_without_replicas_a_revision_gets_nothing_and_the_other_all(
    pair: Callable, http: aiohttp.ClientSession
) -> None:
    house: Pair = await pair(weight=0.5)
    house.fleet.on_gone("n0", 1, "bye")
    assert {await house.say(http, str(number)) for number in range(8)} == {"main"}
    house.next.announce(house.fleet)
    await house.up(2)
    house.fleet.on_gone("r0", 1, "bye")
    assert {await house.say(http, str(number)) for number in range(8)} == {"next"}


async def test_a_replica_that_fits_none_is_refused_as_ever(pair: Callable) -> None:
    house: Pair = await pair(weight=0.5)
    stranger = msgspec.structs.replace(house.next.hello(), weights="00" * 16)
    house.fleet.on_hello("x0", 1, stranger)
    assert house.fleet.alarms.active("weights_mismatch", "x0")
    assert house.fleet.member("x0").misfits
    assert "x0" not in house.fleet.targets()


async def test_a_mirror_gets_copies_and_answers_nobody(
    pair: Callable, http: aiohttp.ClientSession
) -> None:
    house: Pair = await pair(mirror=1.0)
    for number in range(6):
        assert await house.say(http, f"copied {number}", stream=bool(number % 2)) == "main"
    await house.next.wait_calls(6)
    await until(lambda: not len(house.services.mirror))
    assert len(house.old.calls) == 6
    assert {call.request.priority for call in house.next.calls} == {MIRROR_PRIORITY}
    report = await house.report(http)
    assert report["next"]["mirrored"]["attempts"] == 6
    assert report["next"]["live"]["attempts"] == 0
    house.next.script = refuse(BROKEN)
    assert await house.say(http, "still answered") == "main"
    await until(lambda: house.services.mirror.totals["next", "failed"] == 1)
    house.next.script = silent
    before = len(house.next.calls)
    await house.say(http, "the copy hangs")
    await house.next.wait_calls(before + 1)
    await house.services.mirror.close()
    await house.settled()


async def test_copies_are_bounded_and_count_for_no_tenant(
    pair: Callable, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "MAX_COPIES", 2)
    house: Pair = await pair(mirror=1.0)
    house.next.script = silent
    for number in range(5):
        assert await house.say(http, f"copied {number}") == "main"
    await house.next.wait_calls(2)
    assert len(house.services.mirror) == len(house.next.calls) == 2
    assert house.services.mirror.totals == {("next", "skipped"): 3}
    tallies = house.services.admitter.limits.tallies.by_label.values()
    assert sum(of.requests for of in tallies) == 5
    assert sum(of.completion_tokens for of in tallies) == 5 * 3
    await house.services.mirror.close()
    await house.settled()


@pytest.mark.parametrize("bound", ["slo_error_ratio", "slo_ttft_ms"])
async def test_a_revision_beyond_its_bounds_loses_its_share_for_good(
    pair: Callable,
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    bound: str,
) -> None:
    monkeypatch.setattr(module, "CHECK_S", 0.0)
    house: Pair = await pair(weight=1.0, **{bound: 0.0001})
    if bound == "slo_error_ratio":
        await house.put(http, revision="next", weight=0.9)
        house.next.script = refuse(BROKEN)

    async def ask(number: int) -> None:
        messages = [{"role": "user", "content": f"number {number}"}]
        async with house.post(http, "/v1/chat/completions", {**CHAT, "messages": messages}) as r:
            await r.read()

    for number in range(2 * MIN_ATTEMPTS):
        await ask(number)
    report = (await house.report(http))["next"]
    assert report["weight"] == 0.0
    assert report["reverted"]
    assert house.fleet.alarms.active(REVERTED, "next")
    house.next.script = echo
    seen = len(house.next.calls)
    assert {await house.say(http, str(number)) for number in range(5)} == {"main"}
    assert len(house.next.calls) == seen, "nothing but an operator gives the share back"
    status, answer = await house.put(http, revision="next", weight=0.5)
    assert (status, answer["weights"]) == (200, {"main": 0.5, "next": 0.5})
    assert not house.fleet.alarms.active(REVERTED, "next")
    assert (await house.report(http))["next"]["reverted"] == ""


async def test_a_revision_that_never_answers_loses_its_share_before_anybody_is_timed_out(
    pair: Callable, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All are there before the first one is looked at: on a busy machine 100 ms are soon over.
    monkeypatch.setattr(module, "CHECK_S", math.inf)
    house: Pair = await pair(weight=1.0, slo_ttft_ms=100)
    house.next.script = silent
    asking = [asyncio.create_task(house.say(http, str(number))) for number in range(30)]
    await house.next.wait_calls(30)
    monkeypatch.setattr(module, "CHECK_S", 0.0)
    for impatient in asking[:10]:
        impatient.cancel()
    await asyncio.gather(*asking[:10], return_exceptions=True)
    revisions = house.services.revisions

    def reverted() -> bool:
        revisions.report()
        return bool(revisions.others["next"].reverted)

    await until(reverted)
    assert "TTFT p90" in revisions.others["next"].reverted
    assert await house.say(http, "served by the other") == "main"
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await house.settled()


async def test_a_revert_holds_at_all_routers(
    pair: Callable, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECK_S", 0.0)
    house: Pair = await pair(weight=1.0, mirror=0.25, slo_error_ratio=0.0001)
    other = Gateway(house.config, house.card, house.bus, house.revision_cards)
    await other.start()
    try:
        house.next.script = refuse(BROKEN)
        for number in range(MIN_ATTEMPTS):
            messages = [{"role": "user", "content": f"number {number}"}]
            async with house.post(
                http, "/v1/chat/completions", {**CHAT, "messages": messages}
            ) as response:
                await response.read()
        assert (await house.report(http))["next"]["reverted"]
        theirs = other.services.revisions.others["next"]
        await until(lambda: theirs.share == Share(0.0, 0.25))
        # What they say of it again ends nothing here.
        await other.services.registry.share(REVISION, "next", encode_share(Share(0.0, 0.25)))
        await house.put(http, revision="next", mirror=0.5)
        await until(lambda: theirs.share == Share(0.0, 0.5))
    finally:
        await other.close()


async def test_shares_are_set_for_all_routers_and_only_within_bounds(
    pair: Callable, http: aiohttp.ClientSession
) -> None:
    house: Pair = await pair(weight=0.1)
    other = Gateway(house.config, house.card, house.bus, house.revision_cards)
    await other.start()
    try:
        status, answer = await house.put(http, revision="next", weight=0.4, mirror=0.25)
        assert (status, answer["shared"]) == (200, True)
        theirs = other.services.revisions.others["next"]
        await until(lambda: theirs.share == Share(0.4, 0.25))
    finally:
        await other.close()
    for body in (
        {"revision": "nobody", "weight": 0.1},
        {"revision": "next", "weight": 1.5},
        {"revision": "next", "weight": -0.1},
        {"revision": "next", "mirror": "all"},
        {"weight": 0.1},
    ):
        status, answer = await house.put(http, **body)
        assert status == 400, answer
    async with http.put(f"{house.url}/router/revisions", json={}) as response:
        assert response.status == 401


@pytest.mark.parametrize(
    ("said", "configs"),
    [
        ("more than 1", {"a": 0.6, "b": 0.6}),
        ("names of their own", {"main": 0.1}),
        ("an id needs", {"not an id": 0.1}),
    ],
)
def test_what_cant_be_is_refused_at_the_start(said: str, configs: dict[str, float]) -> None:
    made = [RevisionConfig(name=name, path="p", weight=of) for name, of in configs.items()]
    with pytest.raises(ValueError, match=said):
        module.check_revisions(made)


async def test_two_names_for_the_same_model_are_refused(tiny_card: ModelCard) -> None:
    with pytest.raises(ValueError, match="same weights"):
        Gateway(*_same(tiny_card))
    await asyncio.sleep(0)


def _same(card: ModelCard) -> tuple[Any, ...]:
    house = Pair(card, card, {})
    return house.config, card, house.bus, house.revision_cards
