"""Scans don't push out what is used again; a tenant beyond its quota pays first; tails go first."""

from __future__ import annotations

import random

import pytest

from configs.schema import Eviction
from replica.cache.idle import MAX_QUOTAS
from replica.cache.node import NOBODY
from tests.replica.cache.test_prefix import Tables, keys_of


def once(tables: Tables, words: str, tenant: str = "t") -> int:
    """A request for `words`: takes what is cached, makes the rest, leaves; returns its hit."""
    cache, keys = tables.cache, keys_of(words)
    found = tables.hit("it", words, keys, tenant)
    blocks = tables.tables["it"]
    tokens = [word.encode().ljust(8, b"\0") for word in words]
    parent = cache.nodes()[keys[found - 1]] if found else None
    fresh = cache.allocate(len(words) - found)
    for key, text, block in zip(keys[found:], tokens[found:], fresh, strict=True):
        parent = cache.publish(parent, key, text, block, tenant)
        assert parent is not None
    blocks += fresh
    tables.leave("it")
    return found


def resident(tables: Tables) -> set[str]:
    return {key.decode() for key in tables.cache.nodes()}


@pytest.mark.parametrize(("eviction", "kept"), [("segmented", 3), ("lru", 0)])
def test_a_scan_leaves_what_was_used_again(eviction: Eviction, kept: int) -> None:
    tables = Tables(12, eviction)
    once(tables, "abc")
    once(tables, "abc")
    for word in "ghijklmnopqr":
        once(tables, word * 2)
    assert once(tables, "abc") == kept


def test_what_was_used_again_does_not_stay_for_ever() -> None:
    tables = Tables(8)
    for words in ("ab", "cd", "ef"):
        once(tables, words)
        once(tables, words)
    # Four of the eight blocks are protected: the oldest pair is back among the others.
    assert len(resident(tables)) == 6
    once(tables, "uvwx")
    assert resident(tables) == {"c", "cd", "e", "ef", "u", "uv", "uvw", "uvwx"}


def test_finding_one_s_own_blocks_after_a_preemption_is_no_reuse() -> None:
    tables = Tables()
    once(tables, "ab")
    tokens = b"".join(word.encode().ljust(8, b"\0") for word in "ab")
    with tables.cache.lookup(keys_of("ab"), tokens, 2) as lease:
        tables.tables["again"] = lease.take("t", again=True)[0]
    tables.leave("again")
    assert not any(node.reused for node in tables.cache.nodes().values())


def test_S6_a_flood_of_one_tenant_evicts_its_own_blocks() -> None:
    tables = Tables(12)
    once(tables, "abcd", "quiet")
    for word in "ghijklmnopqr":
        once(tables, word * 2, "flood")
    assert once(tables, "abcd", "quiet") == 4
    # The quota is soft: what nobody else wants, the flood may use.
    assert tables.cache.idle.resident["flood"] == 8


def test_S6_of_several_beyond_their_shares_the_furthest_pays() -> None:
    tables = Tables(12)
    tables.cache.limit("small", 0.25)
    tables.cache.limit("smaller", 0.0)
    once(tables, "abc", "small")
    once(tables, "xyzw", "smaller")
    once(tables, "klmno", "quiet")
    assert tables.cache.idle.resident == {"small": 3, "smaller": 4, "quiet": 5}
    assert list(tables.cache.idle.most_resident()) == ["quiet", "smaller", "small"]
    once(tables, "rs", "quiet")
    assert tables.cache.idle.resident == {"small": 3, "smaller": 2, "quiet": 7}
    tables.cache.limit("small", 0.0)
    tables.cache.limit("quiet", 1.0)
    once(tables, "t", "quiet")
    assert tables.cache.idle.resident == {"small": 2, "smaller": 2, "quiet": 8}
    once(tables, "uvij", "quiet")
    assert tables.cache.idle.resident == {"quiet": 12}


def test_shares_are_remembered_within_a_bound() -> None:
    tables = Tables(12)
    for number in range(MAX_QUOTAS + 9):
        tables.cache.limit(f"t{number}", 0.25)
    assert len(tables.cache.idle._quotas) == MAX_QUOTAS


def test_what_two_tenants_use_is_charged_to_nobody() -> None:
    tables = Tables(12)
    once(tables, "pqa", "one")
    once(tables, "pqb", "two")
    owners = {key.decode(): node.tenant for key, node in tables.cache.nodes().items()}
    assert owners == {"p": NOBODY, "pq": NOBODY, "pqa": "one", "pqb": "two"}
    assert tables.cache.idle.resident == {"one": 1, "two": 1}
    tables.cache.clear()
    assert not tables.cache.idle.resident


@pytest.mark.parametrize("eviction", ["segmented", "lru"])
@pytest.mark.parametrize("seed", range(4))
def test_C9_every_order_is_prefix_closed(eviction: Eviction, seed: int) -> None:
    rng = random.Random(seed)
    tables = Tables(10, eviction)
    for _ in range(300):
        words = "".join(rng.choice("ab") for _ in range(rng.randint(1, 5)))
        once(tables, words, rng.choice("xyz"))
        if rng.random() < 0.1:
            tables.evict(rng.randint(0, 4))
