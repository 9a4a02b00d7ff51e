"""The engine's cache by its events: counted copies, parents that come late, what is never told."""

from __future__ import annotations

import random
import struct
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.kvevents import decode_batch
from events.load import KVLayout
from kvstore.identity import Namespace, chain
from replica.cache.journal import Journal
from router.tenancy.tenants import scope_salt, scope_tag
from tests.fakes.kv_publisher import CLEARED, as_array, removed, stored
from tools.bridge import cache as module
from tools.bridge.cache import EngineCache
from tools.errors import CommandError

KEY = b"\7" * 32
LAYOUT = KVLayout(dtype="f", layers=1, kv_heads=1, head_dim=2, block_tokens=2, rope="r")
SPACE = Namespace("m", "w", LAYOUT)
TAG, SALT = scope_tag(KEY, "alice", "private"), scope_salt(KEY, "alice", "private")


class Told:
    """A cache, and what a reader of its journal believes."""

    def __init__(self, *salts: bytes) -> None:
        self.journal = Journal()
        self.cache = EngineCache(KEY, SPACE, salts, self.journal)
        self._keys: set[bytes] = set()

    def __call__(self, *events: object) -> set[bytes]:
        self.cache.apply(decode_batch(msgspec.msgpack.encode([0.0, list(events), 0])))
        for op, key in self.journal.drain():
            if op.name == "CLEARED":
                self._keys.clear()
            elif op.name == "STORED":
                self._keys.add(key)
            else:
                self._keys.remove(key)
        return self._keys


def keys(tokens: list[int], salt: bytes = SALT) -> list[bytes]:
    return list(chain(KEY, SPACE, salt, struct.pack(f"<{len(tokens)}I", *tokens)))


@pytest.mark.parametrize("form", [lambda event: event, as_array])
def test_R8_keys_are_those_that_the_router_computes(form) -> None:
    told = Told(SALT)
    assert told(form(stored([1, 2], [5, 6, 7, 8]))) == set(keys([5, 6, 7, 8]))
    assert told(form(stored([3], [9, 9], parent=2))) == set(keys([5, 6, 7, 8, 9, 9]))
    assert told(form(removed(3))) == set(keys([5, 6, 7, 8]))
    assert told(form(CLEARED)) == set()


def test_S2_a_salted_block_counts_for_its_tenant_alone() -> None:
    told = Told()
    assert told(stored([1], [5, 6], salt=TAG)) == set(keys([5, 6]))
    assert told(stored([2], [7, 8], parent=1)) == set(keys([5, 6, 7, 8]))
    tagged = stored([3], [5, 6], extra_keys=[[["cache_salt", TAG]]])
    assert len(told(removed(2), removed(1), tagged)) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"extra_keys": [["some other salt"]]},
        {"extra_keys": [[TAG, "image"]]},
        {"extra_keys": [["lora", "name", "/path"]]},
        {"lora_id": 1},
        {"lora_name": "adapter"},
        {"token_ids": [-1, 2]},
        {"token_ids": [2**40, 2]},
    ],
)
def test_what_depends_on_more_is_followed_and_never_told(changes: dict) -> None:
    """Also where an unsalted block would count for somebody."""
    told = Told(SALT)
    assert told(stored([1], [5, 6]) | changes) == set()
    assert told(stored([2], [7, 8], parent=1)) == set()
    assert len(told.cache) == 2
    told(removed(2), removed(1))
    assert len(told.cache) == 0


def test_where_everybody_is_salted_an_unsalted_block_is_nobodys() -> None:
    told = Told()
    assert told(stored([1], [5, 6])) == set()
    assert len(told.cache) == 1


def test_an_adapter_in_mid_prompt_and_a_child_that_came_early_hide_what_follows() -> None:
    told = Told(SALT)
    told(stored([2], [7, 8], parent=1, lora_name="adapter"), stored([3], [9, 9], parent=2))
    assert told(stored([1], [5, 6])) == set(keys([5, 6]))
    told(stored([6], [3, 3], parent=5, extra_keys=[["image"]]))
    assert told(stored([5], [1, 1])) == {*keys([5, 6]), *keys([1, 1])}


def test_an_image_in_mid_prompt_hides_what_follows() -> None:
    told = Told(SALT)
    event = stored([1, 2, 3], [1, 2, 3, 4, 5, 6], extra_keys=[None, ["hash"], None])
    assert told(event) == set(keys([1, 2]))


def test_E6_a_block_is_gone_with_its_last_copy() -> None:
    told = Told(SALT)
    block = stored([1], [5, 6])
    told(block, block)
    assert told(removed(1)) == set(keys([5, 6]))
    assert told(removed(1)) == set()
    assert told(removed(1)) == set()
    assert told.cache.counts["unknown_removed"] == 1


def test_E5_children_wait_for_their_parent() -> None:
    told = Told(SALT)
    assert told(stored([3], [5, 6], parent=2), stored([2], [3, 4], parent=1)) == set()
    assert told.cache.waiting == 2
    assert told(stored([1], [1, 2])) == set(keys([1, 2, 3, 4, 5, 6]))
    assert told.cache.waiting == 0


def test_E5_a_waiting_block_that_is_evicted_never_comes() -> None:
    told = Told(SALT)
    told(stored([2, 3], [3, 4, 5, 6], parent=1), removed(3))
    assert told(stored([1], [1, 2])) == set(keys([1, 2, 3, 4]))


def test_who_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    told = Told(SALT)
    for number in range(10):
        told(stored([100 + number], [1, 2], parent=number))
    assert told.cache.waiting == 3
    assert len(told.cache._children) == 3
    assert told.cache.counts["waiting_dropped"] == 7


def test_what_is_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BLOCKS", 3)
    told = Told(SALT)
    for number in range(10):
        told(stored([number], [number, 2]))
        assert len(told.cache) <= 3
    assert told(removed(9)) == set()


def test_other_tiers_and_groups_are_not_the_device() -> None:
    told = Told(SALT)
    assert told(stored([1], [5, 6], medium="CPU"), stored([2], [5, 6], group_idx=1)) == set()
    assert told.cache.counts["other_tier"] == 2


def test_another_block_size_is_said_with_the_remedy() -> None:
    with pytest.raises(CommandError, match="block_tokens = 4"):
        Told()(stored([1], [1, 2, 3, 4]))


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_E6_the_journal_gives_what_is_resident_in_every_order(seed: int, steps: int) -> None:
    """Against a count of copies per block; parents may come after their children."""
    rng, told, copies = random.Random(seed), Told(SALT), Counter()
    tokens = {name: [name, name] for name in range(8)}
    for _ in range(steps):
        name = rng.randrange(8)
        if rng.random() < 0.6:
            copies[name] += 1
            believed = told(stored([name], tokens[name], parent=name - 1 if name else None))
        elif copies[name]:
            copies[name] -= 1
            believed = told(removed(name))
        else:
            believed = told()
        held = {name for name in range(8) if copies[name]}
        all_keys = keys([token for n in range(8) for token in tokens[n]])
        rooted = set()
        for n in range(8):
            if n not in held:
                break
            rooted.add(all_keys[n])
        assert rooted <= believed
        assert len(told.cache) == len(held)
        assert believed <= {all_keys[n] for n in held}
