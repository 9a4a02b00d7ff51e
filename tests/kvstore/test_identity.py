"""Golden vectors and separation of the block keys (C1, C3, S2)."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.load import KVLayout
from kvstore.identity import Namespace, block_key, chain, key_id, private_parent, root

KEY = bytes(range(32))
LAYOUT = KVLayout(
    dtype="float32", layers=2, kv_heads=1, head_dim=8, block_tokens=4, rope="default:10000"
)
SPACE = Namespace(model="m", weights="w", layout=LAYOUT)


def tokens(*ids: int) -> bytes:
    return np.array(ids, dtype="<u4").tobytes()


NINE = tokens(1, 2, 3, 4, 5, 6, 7, 8, 9)
GOLDEN = ["64c25fd0f87cfbeae89eb43a96c97574", "137d75fc9c97c4ec648322481db6999f"]
GOLDEN_PUBLIC = "eaa06fd5dfb41da732df7658a1dd00b6"

SCRIPT = """
from tests.kvstore.test_identity import KEY, NINE, SPACE
from kvstore.identity import chain
print(" ".join(key.hex() for key in chain(KEY, SPACE, b"salt", NINE)))
"""


def test_C1_golden_vectors() -> None:
    assert [key.hex() for key in chain(KEY, SPACE, b"salt", NINE)] == GOLDEN
    assert chain(KEY, SPACE, b"salt", NINE, 1)[1].hex() == GOLDEN_PUBLIC


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_C1_equal_in_every_process(seed: str) -> None:
    environ = {**os.environ, "PYTHONHASHSEED": seed}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == GOLDEN


def test_a_partial_block_has_no_key() -> None:
    assert len(chain(KEY, SPACE, b"", tokens(1, 2, 3))) == 0
    assert len(chain(KEY, SPACE, b"", tokens(1, 2, 3, 4, 5))) == 1


def test_the_chain_goes_on_by_hand() -> None:
    whole = chain(KEY, SPACE, b"s", NINE)
    head = chain(KEY, SPACE, b"s", NINE[:16])
    assert block_key(KEY, head.parent, NINE[16:32]) == whole[1]


def test_C3_salt_and_adapter_are_told_apart() -> None:
    salted = root(KEY, SPACE, b"X")
    adapted = root(KEY, Namespace("m", "w", LAYOUT, adapter=("X", "")), b"")
    assert salted != adapted
    assert root(KEY, Namespace("m", "w", LAYOUT, adapter=("a", "bc")), b"") != root(
        KEY, Namespace("m", "w", LAYOUT, adapter=("ab", "c")), b""
    )


def test_fields_are_framed() -> None:
    assert root(KEY, Namespace("ab", "c", LAYOUT), b"") != root(
        KEY, Namespace("a", "bc", LAYOUT), b""
    )


def test_S2_tenants_share_the_public_head_and_nothing_else() -> None:
    one = chain(KEY, SPACE, b"tenant-1", NINE, public_cut_blocks=1)
    two = chain(KEY, SPACE, b"tenant-2", NINE, public_cut_blocks=1)
    assert one[0] == two[0] == chain(KEY, SPACE, b"", NINE)[0]
    assert one[1] != two[1]
    assert one[1] != chain(KEY, SPACE, b"tenant-1", NINE)[1]


def test_a_cut_at_the_end_moves_the_parent() -> None:
    cut = chain(KEY, SPACE, b"t", NINE[:16], public_cut_blocks=1)
    assert cut.parent == private_parent(KEY, cut[0], b"t")
    with pytest.raises(ValueError, match="longer"):
        chain(KEY, SPACE, b"t", NINE[:12], public_cut_blocks=1)


def test_another_secret_gives_other_keys_and_another_name() -> None:
    assert chain(b"k" * 32, SPACE, b"", NINE).data != chain(KEY, SPACE, b"", NINE).data
    assert key_id(KEY) != key_id(b"k" * 32)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 40))
def test_equal_prefix_equal_keys(ids: list[int], cut: int) -> None:
    whole = chain(KEY, SPACE, b"", tokens(*ids))
    part = chain(KEY, SPACE, b"", tokens(*ids[:cut]))
    assert whole.data[: len(part.data)] == part.data
    assert whole.halves().shape == (len(ids) // 4, 2)
