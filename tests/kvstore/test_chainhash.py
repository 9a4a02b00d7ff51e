"""The native chain of block keys against its Python twin."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from events.load import KVLayout
from kvstore.chaincache import ChainCache, NativeRuns
from kvstore.chainhash import native_chain, python_chain
from kvstore.identity import Namespace, chain

NATIVE = native_chain()


@given(
    key=st.binary(min_size=1, max_size=64),
    parent=st.binary(min_size=16, max_size=16),
    tokens=st.binary(max_size=2_000),
    block_tokens=st.integers(1, 100),
)
def test_C1_native_and_python_give_the_same_keys(
    key: bytes, parent: bytes, tokens: bytes, block_tokens: int
) -> None:
    asked = (key, parent, tokens, 4 * block_tokens)
    assert NATIVE(*asked) == python_chain(*asked)


def test_C1_whole_blocks_of_the_hash_are_no_exception() -> None:
    for block_tokens in (27, 59, 91):  # 20 + 4 * 27 = 128 bytes, and so on
        for extra in (-1, 0, 1):
            asked = (b"k", bytes(16), bytes(range(256)) * 8, 4 * (block_tokens + extra))
            assert NATIVE(*asked) == python_chain(*asked)


@given(
    cuts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 90)), max_size=12),
    parents=st.lists(st.sampled_from([b"a" * 16, b"b" * 16]), min_size=12, max_size=12),
)
def test_C1_known_runs_give_the_same_keys(cuts: list[tuple[int, int]], parents: list) -> None:
    cache = ChainCache(run_blocks=3, max_runs=5)
    for (kind, blocks), parent in zip(cuts, parents, strict=False):
        tokens = bytes(range(200)) * 2 + bytes([kind]) * 8 * blocks
        tokens = tokens[: 8 * blocks + 5]
        assert cache(b"k", parent, tokens, 8) == python_chain(b"k", parent, tokens, 8)
        assert len(cache) <= 5


@given(
    cuts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 90)), max_size=12),
    parents=st.lists(st.sampled_from([b"a" * 16, b"b" * 16]), min_size=12, max_size=12),
    sizes=st.sampled_from([(6, 2), (5, 1), (64, 8)]),
)
def test_C1_native_runs_give_the_same_keys(
    cuts: list[tuple[int, int]], parents: list, sizes: tuple[int, int]
) -> None:
    cache = NativeRuns(*sizes, max_bytes=3_000)
    for (kind, blocks), parent in zip(cuts, parents, strict=False):
        tokens = bytes(range(200)) * 2 + bytes([kind]) * 8 * blocks
        tokens = tokens[: 8 * blocks + 5]
        asked = (b"k", parent, tokens, 8)
        assert cache(*asked) == python_chain(*asked) == cache(*asked)
        assert cache.size_bytes <= 3_000


def test_a_chain_leaves_its_runs_behind() -> None:
    cache = ChainCache(run_blocks=2)
    layout = KVLayout(dtype="f", layers=1, kv_heads=1, head_dim=1, block_tokens=4, rope="r")
    asked = (b"k", Namespace(model="m", weights="w", layout=layout), b"salt", bytes(16 * 7))
    whole = chain(*asked)
    for _ in range(2):
        assert chain(*asked, run=cache).data == whole.data
        assert len(cache) == 3
