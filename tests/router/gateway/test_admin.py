"""/router/*: what is told, what can be changed, and by whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from events.decision import RouteDecision, RouteOutcome
from events.errors import CoreError
from events.subjects import split
from router.tenancy.gate import ADMIN_HEADER
from tests.fakes.scripts import refuse, silent
from tests.router.gateway.house import ADMIN_KEY, CHAT, KEYS, House
from tests.waiting import until

SYSTEM = [{"role": "system", "content": "You are the common head of all tenants. " * 8}]
CHANGING = [
    ("PUT", "/router/policy", {"policy": "round_robin"}),
    ("PUT", "/router/shadow", {"policy": None}),
    ("PUT", "/router/tenants/carol", {"key": "sk-carol-0123"}),
    ("GET", "/router/tenants", None),
    ("DELETE", "/router/tenants/bob", None),
    ("POST", "/router/public-prefixes", {"prompt": "x"}),
    ("GET", "/router/public-prefixes", None),
    ("POST", "/router/cache/clear", {}),
    ("POST", "/router/warm", {"prompt": "x"}),
    ("POST", "/router/explain", {"prompt": "x"}),
]


async def call(
    house: House, http: aiohttp.ClientSession, method: str, path: str, body: Any = None
) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with http.request(method, house.url + path, json=body, headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(("method", "path", "body"), CHANGING)
async def test_changing_routes_need_the_admin_key(
    house: House, http: aiohttp.ClientSession, method: str, path: str, body: Any
) -> None:
    for headers in ({}, {"Authorization": f"Bearer {KEYS['alice']}"}, {ADMIN_HEADER: "x"}):
        async with http.request(method, house.url + path, json=body, headers=headers) as response:
            assert response.status == 401
    async with http.request(
        method, house.url + path, json=body, headers={ADMIN_HEADER: ADMIN_KEY}
    ) as response:
        assert response.status == 200, await response.text()


LOOKING = (
    "/router/replicas",
    "/router/trust",
    "/router/alarms",
    "/router/decisions",
    "/router/policy",
    "/router/shadow",
    "/router/hot",
    "/router/scale",
    "/dashboard",
)


@pytest.mark.parametrize("path", LOOKING)
async def test_S3_without_anonymous_access_looking_needs_the_admin_key(
    build: Callable, http: aiohttp.ClientSession, path: str
) -> None:
    closed, open_ = await build(allow_anonymous=False), await build()
    tenant = {"Authorization": f"Bearer {KEYS['alice']}"}
    basic = {"Authorization": aiohttp.encode_basic_auth("any", ADMIN_KEY)}
    for headers, status in (
        ({}, 401),
        (tenant, 401),
        (basic, 200),
        ({ADMIN_HEADER: ADMIN_KEY}, 200),
    ):
        async with http.get(closed.url + path, headers=headers) as response:
            assert response.status == status
    async with http.get(open_.url + path) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/router/policy", {"policy": "nope"}),
        ("PUT", "/router/policy", {}),
        ("PUT", "/router/policy", {"policy": 1}),
        ("PUT", "/router/policy", {"policy": "round_robin", "x": 1}),
        ("PUT", "/router/shadow", {}),
        ("PUT", "/router/shadow", {"policy": ""}),
        ("PUT", "/router/shadow", {"policy": "nope"}),
        ("PUT", "/router/revisions", {"revision": "next"}),
        ("PUT", "/router/tenants/carol", {"key": "x"}),
        ("PUT", "/router/tenants/carol", {"key": "sk-carol-0123", "scope": "all"}),
        ("PUT", "/router/tenants/carol", {"weight": 2}),
        ("PUT", "/router/tenants/alice", {"weight": 0}),
        ("PUT", "/router/tenants/alice", {"degrade": ["quality"]}),
        ("PUT", "/router/tenants/alice", {"deadline_class": "soon"}),
        ("PUT", "/router/tenants/anonymous", {"key": "sk-anonymous-1"}),
        ("POST", "/router/public-prefixes", {}),
        ("POST", "/router/public-prefixes", {"messages": [{"role": "x"}]}),
        ("POST", "/router/cache/clear", {"limit_blocks": -1}),
        ("POST", "/router/warm", {}),
        ("POST", "/router/warm", {"prompt": "x", "replicas": 0}),
        ("POST", "/router/warm", {"prompt": "x", "replicas": 9}),
    ],
)
async def test_P11_bad_admin_bodies_are_400(
    house: House, http: aiohttp.ClientSession, method: str, path: str, body: Any
) -> None:
    status, answer = await call(house, http, method, path, body)
    assert status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}


async def test_decisions_with_terms_and_outcome(house: House, http: aiohttp.ClientSession) -> None:
    async with house.post(http, "/v1/chat/completions", CHAT) as response:
        decision_id = response.headers["x-warmroute-decision"]
    status, record = await call(house, http, "GET", f"/router/decisions/{decision_id}")
    assert status == 200
    assert record["decision"]["candidates"]
    assert record["outcome"]["status"] == "ok"
    status, listed = await call(house, http, "GET", "/router/decisions?limit=1")
    assert [of["decision"]["decision_id"] for of in listed["decisions"]] == [decision_id]
    assert (await call(house, http, "GET", "/router/decisions/nope"))[0] == 404
    for limit in ("x", "0", "1001", "-1"):
        assert (await call(house, http, "GET", f"/router/decisions?limit={limit}"))[0] == 400


async def test_replicas_and_alarms(house: House, http: aiohttp.ClientSession) -> None:
    _, answer = await call(house, http, "GET", "/router/replicas")
    assert [(of["replica"], of["state"], of["link"]) for of in answer["replicas"]] == [
        ("r0", "healthy", "up"),
        ("r1", "healthy", "up"),
    ]
    house.fleet.alarms.raise_("no_events", "r0", "test")
    _, answer = await call(house, http, "GET", "/router/alarms")
    assert answer["alarms"][0]["name"] == "no_events"


async def test_policy_changes_from_the_next_request_on(
    house: House, http: aiohttp.ClientSession
) -> None:
    assert (await call(house, http, "GET", "/router/policy"))[1]["policy"] == "warmroute"
    await call(house, http, "PUT", "/router/policy", {"policy": "round_robin"})
    for _ in range(4):
        async with house.post(http, "/v1/chat/completions", CHAT) as response:
            assert response.status == 200
    assert [len(replica.calls) for replica in house.replicas] == [2, 2]


async def test_tenants_at_run_time(house: House, http: aiohttp.ClientSession) -> None:
    body = {"key": "sk-carol-0123", "scope": "group:team"}
    status, answer = await call(house, http, "PUT", "/router/tenants/carol", body)
    assert status == 200
    assert answer.items() >= {"name": "carol", "scope": "group:team", "keys": 1}.items()
    async with house.post(http, "/v1/chat/completions", CHAT, key="sk-carol-0123") as response:
        assert response.status == 200
    assert house.calls[0].request.tenant == "carol"


async def test_S2_tenants_are_listed_without_keys_and_removed(
    house: House, http: aiohttp.ClientSession
) -> None:
    scope = {"key": "sk-carol-0123", "scope": "group:team"}
    await call(house, http, "PUT", "/router/tenants/carol", scope)
    status, answer = await call(house, http, "GET", "/router/tenants")
    assert status == 200
    assert [(of["name"], of["scope"], of["keys"]) for of in answer["tenants"]] == [
        ("anonymous", "private", 0),
        ("alice", "private", 1),
        ("bob", "private", 1),
        ("carol", "group:team", 1),
    ]
    assert "sk-" not in str(answer)
    assert (await call(house, http, "DELETE", "/router/tenants/carol"))[0] == 200
    assert (await call(house, http, "DELETE", "/router/tenants/carol"))[0] == 404
    assert (await call(house, http, "DELETE", "/router/tenants/anonymous"))[0] == 404
    async with house.post(http, "/v1/chat/completions", CHAT, key="sk-carol-0123") as response:
        assert response.status == 401
    async with house.post(http, "/v1/chat/completions", CHAT, key=KEYS["alice"]) as response:
        assert response.status == 200


async def test_the_root_leads_to_the_dashboard(house: House, http: aiohttp.ClientSession) -> None:
    async with http.get(house.url + "/", allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (302, "/dashboard")


async def test_any_attempts_decision_lists_all_of_its_request(
    house: House, http: aiohttp.ClientSession
) -> None:
    house.script(refuse(CoreError(status=429, message="full", reroute=True)))
    async with house.post(http, "/v1/chat/completions", CHAT) as response:
        assert response.status == 429
    second, first = house.services.brain.decisions.latest(2)
    ids = [record.decision.decision_id for record in (first, second)]
    for decision_id in ids:
        _, record = await call(house, http, "GET", f"/router/decisions/{decision_id}")
        assert record["attempts"] == ids


async def test_clear_cache_waits_for_all_replicas(
    house: House, http: aiohttp.ClientSession
) -> None:
    status, answer = await call(house, http, "POST", "/router/cache/clear", {"limit_blocks": 9})
    assert status == 200
    assert sorted(of["replica"] for of in answer["replicas"]) == ["r0", "r1"]
    assert [replica.cleared for replica in house.replicas] == [1, 1]


async def test_a_cleared_cache_is_no_longer_counted_on(
    house: House, http: aiohttp.ClientSession
) -> None:
    body = {**CHAT, "messages": SYSTEM}

    async def predicted() -> int:
        async with house.post(http, "/v1/chat/completions", body) as response:
            await response.read()
            decision = response.headers["x-warmroute-decision"]
        _, answer = await call(house, http, "GET", f"/router/decisions/{decision}")
        return answer["decision"]["predicted_cached_tokens"]

    assert await predicted() == 0
    assert await predicted() > 0
    await call(house, http, "POST", "/router/cache/clear", {})
    assert await predicted() == 0


async def test_S2_a_public_prefix_is_shared_and_nothing_else(
    house: House, http: aiohttp.ClientSession
) -> None:
    status, answer = await call(
        house, http, "POST", "/router/public-prefixes", {"messages": SYSTEM}
    )
    assert status == 200
    blocks = answer["tokens"] // 16
    assert blocks > 2

    async def predicted(key: str, text: str) -> int:
        body = {**CHAT, "messages": [*SYSTEM, {"role": "user", "content": text}]}
        async with house.post(http, "/v1/chat/completions", body, key=key) as response:
            decision_id = response.headers["x-warmroute-decision"]
        record = house.services.brain.decisions.get(decision_id)
        return record.decision.predicted_cached_tokens

    text = "a long private question of one tenant " * 8
    assert await predicted(KEYS["alice"], text) == 0
    assert await predicted(KEYS["bob"], text) == 16 * blocks
    assert await predicted(KEYS["alice"], text) > 16 * blocks
    assert {call.request.public_cut_blocks for call in house.calls} == {blocks}
    _, listed = await call(house, http, "GET", "/router/public-prefixes")
    assert listed["version"] == 1
    assert "common head" not in str(listed)
    path = f"/router/public-prefixes/{answer['name']}"
    assert (await call(house, http, "DELETE", path))[0] == 200
    assert (await call(house, http, "DELETE", path))[0] == 404
    assert await predicted(KEYS["bob"], text) == 0
    assert {call.request.public_cut_blocks for call in house.calls} == {blocks, 0}
    _, listed = await call(house, http, "GET", "/router/public-prefixes")
    assert listed == {"version": 2, "prefixes": []}


async def test_warm_pins_to_k_replicas_as_the_tenant_and_probes(
    house: House, http: aiohttp.ClientSession
) -> None:
    seen: dict[tuple[str, bytes], int] = {}

    async def remember(call):
        key = (call.replica.replica_id, call.request.prompt)
        cached = call.prompt_tokens - 1 if key in seen else 0
        seen[key] = cached
        await call.answer(cached=cached)

    house.script(remember)
    body = {"tenant": "alice", "messages": SYSTEM, "replicas": 2}
    status, answer = await call(house, http, "POST", "/router/warm", body)
    assert status == 200, answer
    assert sorted(of["replica"] for of in answer["replicas"]) == ["r0", "r1"]
    assert all(of["cached_tokens"] == of["prompt_tokens"] - 1 for of in answer["replicas"])
    assert [len(replica.calls) for replica in house.replicas] == [2, 2]
    assert {call.request.tenant for call in house.calls} == {"alice"}
    unknown = {**body, "tenant": "nobody"}
    assert (await call(house, http, "POST", "/router/warm", unknown))[0] == 404
    await house.settled()


async def test_warm_takes_the_same_replica_for_the_same_prompt(
    house: House, http: aiohttp.ClientSession
) -> None:
    body = {"prompt": "the same prompt again " * 20}
    names = set()
    for _ in range(3):
        _, answer = await call(house, http, "POST", "/router/warm", body)
        names.add(answer["replicas"][0]["replica"])
    assert len(names) == 1


async def test_warm_ends_with_a_replicas_failure(build, http: aiohttp.ClientSession) -> None:
    house = await build(replicas=1, first_token_timeout_s=0.2)
    house.script(silent)
    status, _ = await call(house, http, "POST", "/router/warm", {"prompt": "x"})
    assert status == 504
    await house.settled()


async def test_decisions_and_outcomes_are_announced_on_the_bus(
    house: House, http: aiohttp.ClientSession
) -> None:
    import msgspec

    heard: dict[str, bytes] = {}
    await house.bus.subscribe(
        "wr.v1.local.router.router-0.*",
        lambda subject, data: heard.update({split(subject)[2]: data}),
    )
    async with house.post(http, "/v1/chat/completions", CHAT) as response:
        decision_id = response.headers["x-warmroute-decision"]
    await until(lambda: {"decisions", "outcomes"} <= heard.keys())
    (decision,) = msgspec.msgpack.decode(heard["decisions"], type=tuple[RouteDecision, ...])
    (outcome,) = msgspec.msgpack.decode(heard["outcomes"], type=tuple[RouteOutcome, ...])
    assert decision.decision_id == outcome.decision_id == decision_id


async def test_E4_trust_is_told_by_replica_and_tenant_and_measured(
    house: House, http: aiohttp.ClientSession
) -> None:
    for _ in range(2):
        async with http.post(house.url + "/v1/chat/completions", json=CHAT) as response:
            assert response.status == 200
            await response.read()
    _, told = await call(house, http, "GET", "/router/trust")
    served = [replica for replica in told["replicas"] if replica["tenants"]]
    sums = [of for replica in served for of in replica["tenants"].values()]
    assert sum(of["answered"] for of in sums) == told["total"]["answered"] == 2
    assert {replica["locality"] for replica in told["replicas"]} <= {
        "digest",
        "optimistic",
        "unknown",
    }
    async with http.get(house.url + "/metrics") as response:
        text = await response.text()
    for name in (
        'trust_answered_total{replica="',
        "trust_skipped_tokens_total",
        "wrong_depth_ratio 0.0",
        "index_limit_bytes 5.3",
        "text_cache_bytes ",
        "text_cache_limit_bytes 6.7",
        "promised_limit_bytes",
        "digest_false_positive_rate",
    ):
        assert f"warmroute_{name}" in text
