"""Nothing loaded is used before it is the block that was asked for (K7, C5)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from events.load import KVLayout
from kvstore.block import BlockHeader, encode, header_of
from kvstore.errors import Reason
from kvstore.identity import BlockIdentity, Namespace
from kvstore.layout import Layout
from kvstore.sums import layer_sums
from kvstore.tier import hit
from kvstore.verify import Verifier
from tests.kvstore.blocks import (
    BOOT,
    CLUSTER_KEY,
    KV_LAYOUT,
    LAYOUT,
    NOW_MS,
    SPACE,
    header_for,
    payload_of,
    run_of,
)

BLOCKS = run_of(3)
VERIFIER = Verifier(CLUSTER_KEY, LAYOUT, now_ms=lambda: NOW_MS)


def forged(**change: object) -> bytes:
    header = header_for(BLOCKS[1], payload_of())
    block = replace(header.block, **{k: v for k, v in change.items() if hasattr(header.block, k)})
    rest = {k: v for k, v in change.items() if not hasattr(header.block, k)}
    return encode(replace(header, block=block, **rest))


def test_the_right_block_passes() -> None:
    payload = payload_of()
    header = VERIFIER.header(forged(), BLOCKS[1])
    assert isinstance(header, BlockHeader)
    assert VERIFIER.payload(header, payload) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"key": bytes(16)}, Reason.KEY),
        ({"parent": bytes(16)}, Reason.PARENT),
        ({"tokens": bytes(16)}, Reason.TOKENS),
        ({"index": 5}, Reason.INDEX),
        ({"public_cut_blocks": 1}, Reason.INDEX),
        ({"namespace": bytes(16)}, Reason.NAMESPACE),
        ({"scope": bytes(16)}, Reason.NAMESPACE),
        ({"layout": bytes(16)}, Reason.LAYOUT),
        ({"expires_ms": NOW_MS}, Reason.EXPIRED),
    ],
)
def test_each_difference_has_its_name(change: dict[str, object], reason: Reason) -> None:
    assert VERIFIER.header(forged(**change), BLOCKS[1]) is reason


def test_a_key_that_does_not_follow_from_its_tokens_is_found() -> None:
    """Whoever asks for a forged identity is not believed either."""
    wrong = replace(BLOCKS[1], tokens=bytes(16))
    assert VERIFIER.header(forged(tokens=bytes(16)), wrong) is Reason.KEY


def test_any_changed_byte_of_any_layer_is_found() -> None:
    payload = payload_of()
    header = header_for(BLOCKS[0], payload)
    for at in range(len(payload)):  # keys, values, padding
        payload[at] ^= 0x40
        assert VERIFIER.payload(header, payload) is Reason.PAYLOAD
        payload[at] ^= 0x40
    assert VERIFIER.payload(header, payload) is None
    assert VERIFIER.payload(header, payload[:-1]) is Reason.SIZE
    swapped = payload[128:256] + payload[:128] + payload[256:]
    assert VERIFIER.payload(header, swapped) is Reason.PAYLOAD


def of_layout(**change: object) -> Namespace:
    fields = {name: getattr(KV_LAYOUT, name) for name in KV_LAYOUT.__struct_fields__}
    return replace(SPACE, layout=KVLayout(**(fields | change)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reader", "reason"),
    [
        (of_layout(dtype="float16"), Reason.NAMESPACE),
        (of_layout(layers=1, kv_heads=3), Reason.NAMESPACE),
        (of_layout(rope="default:1"), Reason.NAMESPACE),
        (replace(SPACE, weights="another revision"), Reason.NAMESPACE),
        (replace(SPACE, adapter=("a", "digest")), Reason.NAMESPACE),
    ],
)
def test_K7_blocks_of_another_model_or_layout_are_refused(
    reader: Namespace, reason: Reason
) -> None:
    """Same tokens, same size in bytes: neither the key nor the header fits."""
    asked = run_of(3, space=reader)[1]
    verifier = Verifier(CLUSTER_KEY, Layout.of(reader.layout), now_ms=lambda: NOW_MS)
    assert asked.key != BLOCKS[1].key
    assert verifier.header(forged(), asked) is reason


def test_K7_a_header_that_lies_about_its_layout_is_refused() -> None:
    """The identity is right, the bytes were gathered in another order."""
    other = replace(LAYOUT, kv_heads=2, head_dim=3)
    block = BLOCKS[0]
    header = header_of(block, other, payload_of(layout=other), BOOT, now_ms=NOW_MS)
    assert VERIFIER.header(encode(header), block) is Reason.LAYOUT


def test_C5_salt_and_adapter_are_in_key_namespace_and_scope() -> None:
    def three(block: BlockIdentity) -> tuple[bytes, bytes, bytes]:
        return block.key, block.namespace, block.scope

    mine, theirs = three(run_of(1, salt=b"a")[0]), three(run_of(1, salt=b"b")[0])
    assert all(one != other for one, other in zip(mine, theirs, strict=True))
    adapted = replace(SPACE, adapter=("a", "digest"))
    assert three(run_of(1, salt=b"a", space=adapted)[0])[:2] != mine[:2]


def test_C5_tenants_meet_in_the_public_prefix_only() -> None:
    one, other = run_of(4, salt=b"a", cut=2), run_of(4, salt=b"b", cut=2)
    assert one[:2] == other[:2] == run_of(2, salt=b"", cut=0)
    assert {block.key for block in one[2:]}.isdisjoint(block.key for block in other[2:])
    for block in (*one, *other):
        assert isinstance(
            VERIFIER.header(encode(header_for(block, payload_of())), block), BlockHeader
        )


def test_the_sums_that_a_tier_made_while_copying_are_what_counts() -> None:
    payload = payload_of()
    data, sums = forged(), layer_sums(payload, LAYOUT.layers)
    assert isinstance(VERIFIER.verdict(hit(data), BLOCKS[1], payload), BlockHeader)
    assert isinstance(VERIFIER.verdict(hit(data, sums), BLOCKS[1], payload), BlockHeader)
    assert VERIFIER.verdict(hit(data, bytes(24)), BLOCKS[1], payload) is Reason.PAYLOAD
    assert VERIFIER.verdict(hit(data, sums[:-8]), BLOCKS[1], payload) is Reason.PAYLOAD
    assert VERIFIER.verdict(hit(data, sums), BLOCKS[0], payload) is Reason.KEY
    payload[0] ^= 1
    assert VERIFIER.verdict(hit(data), BLOCKS[1], payload) is Reason.PAYLOAD
