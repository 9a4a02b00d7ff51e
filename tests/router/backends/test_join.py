"""How backends come into the fleet and out of it: by probes, by name, never by the bus alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import aiohttp
import msgspec
import numpy as np
import pytest

from configs.model.card import ModelCard
from configs.schema import BackendConfig, ClusterConfig, ModelConfig, ReplicaConfig
from events.load import DigestShape, ReplicaHello
from router.backends.join import Joiner, Seat
from router.backends.roster import base_url, hello_of, roster
from router.fleet.expected import Expected
from router.fleet.fleet import Fleet
from tests.fakes.replica import FakeReplica
from tests.router.backends.house import ForeignHouse, read
from tests.router.gateway.house import CHAT, SECRET
from tests.waiting import until

SHAPE = DigestShape(bits=1024, k=4)


def cluster(card: ModelCard, *backends: BackendConfig, **more: object) -> ClusterConfig:
    model = ModelConfig(path=str(card.path), name="tiny")
    return ClusterConfig(secret=SECRET, model=model, backends=backends, **more)


def backend(**changes: object) -> BackendConfig:
    return BackendConfig(**({"id": "f0", "url": "http://127.0.0.1:9"} | changes))


class Joining:
    """A fleet with one backend in front of it; `at` is its clock."""

    def __init__(self, card: ModelCard, events: str) -> None:
        config = cluster(card, backend(events=events))
        self.at = 0.0
        self.fleet = Fleet(Expected.of(card, config), lambda: self.at)
        (one,) = roster(config).values()
        self.seat = Seat(one, hello_of(one, config, card))
        self.joiner = Joiner(self.fleet, {"f0": self.seat})

    @property
    def member(self):
        return self.fleet.member("f0")

    def probe(self, *answers: bool) -> None:
        for answered in answers:
            self.joiner.probed(self.seat, answered)

    def bridge_says(self, boot: int, **changes: object) -> ReplicaHello:
        hello = msgspec.structs.replace(self.seat.hello, digest=SHAPE, **changes)
        self.joiner.on_hello("f0", boot, hello)
        return hello


@pytest.fixture
def plain(tiny_card: ModelCard) -> Joining:
    return Joining(tiny_card, "none")


@pytest.fixture
def bridged(tiny_card: ModelCard) -> Joining:
    return Joining(tiny_card, "bridge")


def test_R13_one_failed_probe_changes_nothing(plain: Joining) -> None:
    plain.probe(True)
    boot = plain.member.boot
    for _ in range(5):
        plain.probe(False, False, True)
        assert plain.member.linked
        assert plain.member.boot == boot
    assert not plain.fleet.alarms.active("backend_down", "f0")
    plain.probe(False, False, False)
    assert plain.member.unavailable(0.0) == "no_link"
    assert plain.fleet.alarms.active("backend_down", "f0")
    plain.probe(True)
    assert not plain.member.linked
    plain.probe(True)
    assert plain.member.linked
    assert not plain.fleet.alarms.active("backend_down", "f0")
    assert plain.member.boot > boot


def test_a_server_that_was_never_there_is_named(plain: Joining) -> None:
    plain.probe(False, False)
    assert len(plain.fleet.alarms) == 0
    plain.probe(False)
    (alarm,) = plain.fleet.alarms
    assert (alarm.name, alarm.replica) == ("backend_down", "f0")
    assert plain.seat.backend.url in alarm.detail


def test_R13_answers_outweigh_probes_of_a_busy_server(plain: Joining) -> None:
    plain.probe(True)
    for _ in range(10):
        plain.probe(False, False)
        plain.seat.health.heard()
    assert plain.member.linked


def test_the_servers_own_limit_holds_whoever_comes_first(bridged: Joining) -> None:
    bridged.bridge_says(1_000_000)
    bridged.seat.limit_context(100)
    bridged.probe(True)
    assert bridged.member.hello.context_tokens == 100
    bridged.bridge_says(2_000_000, context_tokens=5_000)
    assert bridged.member.hello.context_tokens == 100


async def test_a_prompt_that_the_server_can_not_take_is_refused_here(
    build: Callable, http: aiohttp.ClientSession
) -> None:
    models = {"data": [{"id": "other", "max_model_len": 9}, {"id": "up", "max_model_len": 64}]}
    house = await build(more={"/v1/models": models})
    response, body = await read(house, http, {**CHAT, "max_tokens": 200})
    assert response.status == 400
    assert json.loads(body)["error"]["code"] == "context_length_exceeded"
    assert (await read(house, http, CHAT))[0].status == 200
    assert len(house.asked) == 1


def test_without_events_it_is_labelled_and_no_alarm(plain: Joining) -> None:
    plain.probe(True)
    plain.at = 100.0
    plain.probe(True)
    plain.fleet.check()
    (view,) = plain.fleet.replicas()
    assert (view.locality, view.state, view.hello.engine) == ("optimistic", "healthy", "openai")
    assert not len(plain.fleet.alarms)


def test_E4_a_bridge_that_never_came_is_an_alarm(bridged: Joining) -> None:
    bridged.probe(True)
    bridged.at = 100.0
    bridged.probe(True)
    bridged.fleet.check()
    assert bridged.fleet.alarms.active("no_events", "f0")
    assert bridged.fleet.replicas()[0].locality == "optimistic"


def test_the_bridge_brings_the_digest_and_the_backend_outlives_it(bridged: Joining) -> None:
    bridged.probe(True)
    bridged.bridge_says(1_000)
    assert (bridged.member.boot, bridged.member.linked) == (1_000, True)
    bits = np.zeros(SHAPE.bits // 8, np.uint8)
    bridged.joiner.on_digest_reset("f0", 1_000, 1, 0, SHAPE, bits)
    assert bridged.fleet.replicas()[0].locality == "digest"
    bridged.joiner.on_gone("f0", 1_000, "shutdown")
    assert bridged.member.boot < 1_000
    assert bridged.member.linked
    assert bridged.fleet.replicas()[0].locality == "unknown"
    bridged.bridge_says(2_000)
    assert (bridged.member.boot, bridged.member.linked) == (2_000, True)


async def test_a_backend_beside_the_largest_pool_is_an_alarm(build: Callable) -> None:
    house: ForeignHouse = await build(replicas=2, changes={"dtype": "bfloat16"})
    await until(lambda: house.fleet.alarms.active("other_pool", "f0"))


def test_a_bridge_of_a_dead_server_does_not_make_it_live(bridged: Joining) -> None:
    bridged.bridge_says(1_000)
    assert not bridged.member.linked
    bridged.probe(True)
    assert bridged.member.linked
    bridged.probe(False, False, False)
    assert not bridged.member.linked
    bridged.joiner.on_gone("f0", 1_000, "silent")
    assert bridged.member is None


@pytest.mark.parametrize(
    "changes", [{"link_url": "http://127.0.0.1:8"}, {"engine": "warmroute"}, {"weights": "x"}]
)
def test_S3_a_bridge_that_tells_of_something_else_is_refused(
    bridged: Joining, changes: dict
) -> None:
    bridged.probe(True)
    boot = bridged.member.boot
    bridged.bridge_says(1_000, **changes)
    assert bridged.member.boot == boot
    assert bridged.fleet.alarms.active("backend_mismatch", "f0")
    bridged.bridge_says(2_000)
    assert not bridged.fleet.alarms.active("backend_mismatch", "f0")


def test_S3_where_no_bridge_is_configured_none_is_heard(plain: Joining) -> None:
    plain.probe(True)
    plain.bridge_says(1_000)
    assert plain.member.boot == 1


def test_S3_the_bus_makes_nobody_a_backend(plain: Joining) -> None:
    plain.joiner.on_hello("evil", 1, plain.seat.hello)
    assert plain.fleet.member("evil") is None
    assert plain.joiner.refused["unknown_backend"] == 1
    assert plain.fleet.alarms.active("unknown_backend", "evil")
    plain.joiner.on_gone("evil", 1, "silent")
    assert not len(plain.fleet.alarms)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ws://127.0.0.1:1",
        "http://user@127.0.0.1:1",
        "http://127.0.0.1:1/?a",
        "http://",
        "http://127.0.0.1:99999",
        "127.0.0.1:80",
    ],
)
def test_S3_addresses_are_checked_before_anything_is_dialled(url: str) -> None:
    with pytest.raises(ValueError):
        base_url(url)


def test_S3_an_id_is_given_once(tiny_card: ModelCard) -> None:
    for config in (
        cluster(tiny_card, backend(), backend()),
        cluster(tiny_card, backend(), replicas=(ReplicaConfig(id="f0"),)),
        cluster(tiny_card, backend(id="a.b")),
        cluster(tiny_card, backend(api_key_env="WR_NO_SUCH_KEY")),
    ):
        with pytest.raises(ValueError, match="backend '"):
            roster(config)


async def test_the_key_goes_to_the_backend_and_nowhere_else(
    build: Callable, http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WR_TEST_KEY", "sk-canary-77")
    house: ForeignHouse = await build(changes={"api_key_env": "WR_TEST_KEY"})
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with house.post(http, "/v1/chat/completions", body) as response:
        assert response.status == 200
        assert "canary" not in str(response.headers)
    assert house.asked[0].headers["authorization"] == "Bearer sk-canary-77"
    for path in ("/router/replicas", "/metrics", "/router/decisions"):
        async with http.get(house.url + path) as response:
            assert b"canary" not in await response.read()


async def test_probes_fall_back_to_the_list_of_models(tiny_card: ModelCard) -> None:
    house = ForeignHouse(tiny_card, 1)
    house.servers[0].health_path = "/v1/models"
    async with house:
        assert house.servers[0].probes[:2] == ["/health", "/v1/models"]


async def test_ready_without_a_replica_of_our_own(build: Callable, http) -> None:
    house = await build(servers=2)
    async with http.get(house.url + "/ready") as response:
        assert (await response.json())["replicas"] == 2


async def test_rates_are_learnt_from_answers(build: Callable, http) -> None:
    house: ForeignHouse = await build()
    body = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    for _ in range(3):
        async with house.post(http, "/v1/chat/completions", body) as response:
            await response.read()
    seat = house.services.backends.seats["f0"]
    assert seat.rates.prefill.confidence > 0
    house.services.backends.feed.probed(seat, True)
    await until(lambda: house.fleet.member("f0").load.prefill.confidence > 0)


async def test_public_heads_are_for_our_own_replicas(build: Callable) -> None:
    foreign, mixed = await build(), await build(replicas=1)
    assert not foreign.services.jobs.pool().public_prefixes
    assert mixed.services.jobs.pool().public_prefixes


async def test_a_replica_of_our_own_may_not_take_a_backends_name(build: Callable) -> None:
    house: ForeignHouse = await build()
    impostor: FakeReplica = house.new_replica("f0", boot=5)
    house.services.backends.feed.on_hello("f0", 5, impostor.hello())
    assert house.fleet.member("f0").boot == 1
    await asyncio.sleep(0)
