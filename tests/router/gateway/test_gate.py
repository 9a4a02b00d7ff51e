"""Keys, salts, bounds and public prefixes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import RouterConfig, TenantConfig
from events.errors import UserError
from events.request import SamplingParams
from router.dispatch.job import Job
from router.tenancy.gate import ADMIN_HEADER, Admission, Gate
from router.tenancy.prefixes import MAX_PREFIXES, PublicPrefixes
from router.tenancy.tenants import (
    MAX_KEYS,
    MAX_TENANTS,
    TenantChange,
    Tenants,
    hash_key,
    scope_salt,
)
from tests.router.gateway.kit import job
from tests.router.kit import inside

KEY = b"\1" * 32
ADMIN = "the-admin-key"


def tenants() -> Tenants:
    return Tenants(KEY, [TenantConfig(name="alice", key_sha256=(hash_key("alice-key-1").hex(),))])


def gate(**settings: object) -> Gate:
    return Gate(RouterConfig(**settings), tenants(), clock=lambda: 0.0)


def job_of(prompt_tokens: int, answer: int = 0, n: int = 1) -> Job:
    return job(
        prompt=bytes(4 * prompt_tokens), sampling=SamplingParams(max_tokens=answer, seed=0, n=n)
    )


def admitted(door: Gate, *jobs: Job) -> Admission:
    return door.admitted(jobs, door.expected_tokens(jobs))


def status(caught: pytest.ExceptionInfo[UserError]) -> int:
    return caught.value.error.status


def test_S2_salts_depend_on_cluster_and_scope() -> None:
    salts = {
        scope_salt(KEY, "alice", "private"),
        scope_salt(KEY, "bob", "private"),
        scope_salt(b"\2" * 32, "alice", "private"),
        scope_salt(KEY, "alice", "group:alice"),
        scope_salt(KEY, "alice", "group:team"),
    }
    assert len(salts) == 5
    assert scope_salt(KEY, "alice", "group:team") == scope_salt(KEY, "bob", "group:team")


@pytest.mark.parametrize("scope", ["", "public", "group:", "group:a b", "private:x", "Group:a"])
def test_S2_other_scopes_are_refused(scope: str) -> None:
    with pytest.raises(ValueError):
        scope_salt(KEY, "alice", scope)


def test_keys_find_their_tenants() -> None:
    of = tenants()
    assert of.of_key("alice-key-1").name == "alice"
    assert of.of_key("alice-key-2") is None
    of.put("alice", TenantChange(key="alice-key-2"))
    assert of.of_key("alice-key-1") is None
    assert of.of_key("alice-key-2").name == "alice"


@pytest.mark.parametrize(
    ("name", "key", "scope"),
    [
        ("bob", "short", "private"),
        ("bob", "x" * 600, "private"),
        ("bob", "alice-key-1", "private"),
        ("anonymous", "long-enough", "private"),
        ("no name", "long-enough", "private"),
        ("bob", "long-enough", "everybody"),
    ],
)
def test_bad_tenants_are_refused(name: str, key: str, scope: str) -> None:
    of = tenants()
    with pytest.raises(UserError) as caught:
        of.put(name, TenantChange(key=key, scope=scope))
    assert status(caught) == 400
    assert of.of_key("alice-key-1").name == "alice"
    assert len(of) == 1


def test_the_registry_is_bounded() -> None:
    of = tenants()
    for number in range(MAX_TENANTS - 1):
        of.put(f"t{number}", TenantChange(key=f"key-number-{number}"))
    with pytest.raises(UserError):
        of.put("one-more", TenantChange(key="key-of-one-more"))
    of.put("t1", TenantChange(key="another-key-of-t1"))


def test_keys_are_added_and_removed_singly() -> None:
    of = tenants()
    of.put("alice", TenantChange(add_key="alice-key-2"))
    assert of.of_key("alice-key-1") is of.of_key("alice-key-2")
    of.put("alice", TenantChange(remove_key="alice-key-1"))
    assert of.of_key("alice-key-1") is None
    with pytest.raises(UserError):
        of.put("alice", TenantChange(remove_key="alice-key-2"))
    for number in range(MAX_KEYS - 1):
        of.put("alice", TenantChange(add_key=f"alice-more-{number}"))
    with pytest.raises(UserError):
        of.put("alice", TenantChange(add_key="alice-one-too-many"))
    assert of.key_count("alice") == MAX_KEYS
    assert of.remove("alice")
    assert of.of_key("alice-key-2") is None


def test_what_is_not_given_stays() -> None:
    of = tenants()
    of.put("alice", TenantChange(scope="group:team", policy={"weight": 3.0}))
    alice = of.put("alice", TenantChange(policy={"priority": 2}))
    assert (alice.scope, alice.policy.weight, alice.policy.priority) == ("group:team", 3.0, 2)
    assert of.of_key("alice-key-1") == alice
    of.put("anonymous", TenantChange(policy={"max_concurrent": 1}))
    assert of.anonymous.policy.max_concurrent == 1
    assert of.named("anonymous").salt == tenants().anonymous.salt


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Basic abc", "Bearer wrong-key"])
def test_wrong_headers_are_401(value: str) -> None:
    with pytest.raises(UserError) as caught:
        gate().authenticate({"Authorization": value})
    assert status(caught) == 401


def test_the_admin_key() -> None:
    guarded = gate(admin_key_sha256=hash_key(ADMIN).hex())
    guarded.check_admin({"Authorization": f"Bearer {ADMIN}"})
    guarded.check_admin({ADMIN_HEADER: ADMIN})
    for headers in ({}, {ADMIN_HEADER: "x"}, {"Authorization": "Bearer alice-key-1"}):
        with pytest.raises(UserError) as caught:
            guarded.check_admin(headers)
        assert status(caught) == 401
    with pytest.raises(UserError) as closed:
        gate().check_admin({ADMIN_HEADER: ""})
    assert status(closed) == 403


def test_O3_tokens_in_flight_are_bounded_and_returned() -> None:
    now = [0.0]
    door = Gate(RouterConfig(max_inflight_tokens=100), tenants(), clock=lambda: now[0])
    with admitted(door, job_of(80)):
        with pytest.raises(UserError) as full, admitted(door, job_of(30)):
            pass
        assert status(full) == 429
        assert full.value.error.retry_after_s >= 1
        with admitted(door, job_of(10), job_of(10)):
            assert door.tokens == 100
    assert door.tokens == 0
    with pytest.raises(UserError) as large, admitted(door, job_of(101)):
        pass
    assert status(large) == 413


def test_O3_an_answer_counts_as_expected_until_it_has_come_to_more() -> None:
    door = gate(max_inflight_tokens=1_000, expected_answer_tokens=100)
    with admitted(door, job_of(50, answer=8_000)) as long, admitted(door, job_of(50, 10, 2)):
        assert door.tokens == 150 + 70
        for _ in range(10):
            long.grow(10)
        assert door.tokens == 220
        long.grow(900)
        assert door.tokens == 1_120
        with pytest.raises(UserError) as full, admitted(door, job_of(1)):
            pass
        assert status(full) == 429
    assert door.tokens == 0


def test_O3_retry_after_comes_from_the_drain_rate() -> None:
    now = [0.0]
    door = Gate(RouterConfig(max_inflight_tokens=1_000), tenants(), clock=lambda: now[0])
    for second in range(60):
        now[0] = float(second)
        with admitted(door, job_of(10)):
            pass
    with admitted(door, job_of(1_000)):
        waits = []
        for excess in (10, 100):
            with pytest.raises(UserError) as full, admitted(door, job_of(excess)):
                pass
            waits.append(full.value.error.retry_after_s)
    assert waits[0] <= 3
    assert 8 <= waits[1] <= 20


def test_requests_are_bounded_and_counted_down_on_errors() -> None:
    door = gate(max_connections=1)
    with pytest.raises(KeyError), inside(door):
        raise KeyError
    with inside(door), pytest.raises(UserError) as full, inside(door):
        pass
    assert status(full) == 503
    assert door.requests == 0


def ids(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def test_the_longest_public_prefix_counts_in_full_blocks() -> None:
    prefixes = PublicPrefixes(b"k" * 32)
    head = list(range(10))
    prefixes.add(ids(*head))
    prefixes.add(ids(*head, 10, 11, 12))
    assert prefixes.cut_blocks(ids(*range(20)), 4) == 3
    assert prefixes.cut_blocks(ids(*head, 99, 99), 4) == 2
    assert prefixes.cut_blocks(ids(*range(8)), 4) == 2
    assert prefixes.cut_blocks(ids(*range(7)), 4) == 0
    assert prefixes.cut_blocks(ids(1, 2, 3, 4), 4) == 0


def test_public_prefixes_are_versioned_and_bounded() -> None:
    prefixes = PublicPrefixes(b"k" * 32)
    first = prefixes.add(ids(1))
    assert prefixes.add(ids(1)) is first
    assert prefixes.version == 1
    for number in range(2, MAX_PREFIXES + 1):
        prefixes.add(ids(number))
    with pytest.raises(UserError):
        prefixes.add(ids(0))
    with pytest.raises(UserError):
        PublicPrefixes(b"k" * 32).add(b"")


@given(
    registered=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=5),
    prompt=st.lists(st.integers(0, 2), max_size=12),
    block=st.integers(1, 4),
)
def test_the_cut_equals_a_plain_search(
    registered: list[list[int]], prompt: list[int], block: int
) -> None:
    prefixes = PublicPrefixes(b"k" * 32)
    for head in registered:
        prefixes.add(ids(*head))
    whole = [len(head) // block for head in registered]
    expected = max(
        (
            blocks
            for head, blocks in zip(registered, whole, strict=True)
            if prompt[: blocks * block] == head[: blocks * block] and len(prompt) >= blocks * block
        ),
        default=0,
    )
    assert prefixes.cut_blocks(ids(*prompt), block) == expected
