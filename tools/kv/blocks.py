"""Going through the blocks of a kvd."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import msgspec
import numpy as np

from kvstore.arena.messages import MAX_KEYS, Opened
from kvstore.block import BlockHeader, decode
from kvstore.errors import BadBlockError, Reason
from kvstore.identity import PUBLIC_SCOPE, block_key
from kvstore.kvd.client import SocketControl
from kvstore.sums import copy_sums

_AT_ONCE = 64


class BlockView(msgspec.Struct, frozen=True):
    """What may be shown of a block. Digests in hex."""

    key: str
    namespace: str
    owner: str
    index: int
    tokens: int
    layers: int
    dtype: str
    payload_bytes: int
    created_ms: int
    expires_ms: int


class Verified(msgspec.Struct, frozen=True):
    """How many blocks were right, and how many wrong, by reason."""

    right: int
    wrong: dict[str, int]


def _pages(control: SocketControl, after: bytes, size: int, deadline: float) -> Iterator[bytes]:
    """All readable keys, in order, asked for page by page."""
    while keys := control.keys(after, size, deadline):
        yield from keys
        after = keys[-1]


def _before(prefix: str) -> bytes:
    """The largest key that sorts before every key that begins so. Raises ValueError."""
    if not prefix:
        return b""
    first = int(prefix.ljust(32, "0")[:32], 16)
    return (first - 1).to_bytes(16, "big") if first else b""


def described(control: SocketControl, prefix: str, limit: int, deadline: float) -> list[BlockView]:
    """The first blocks whose keys begin with `prefix` (hex)."""
    found: list[BlockView] = []
    for key in _pages(control, _before(prefix), min(limit, MAX_KEYS), deadline):
        if len(found) == limit or not key.hex().startswith(prefix):
            break
        if opened := control.open([key], deadline):
            found.append(_view(decode(opened[0].header)))
            control.release([opened[0].place])
    return found


def _view(header: BlockHeader) -> BlockView:
    block = header.block
    return BlockView(
        key=block.key.hex(),
        namespace=block.namespace.hex(),
        owner="public" if block.scope == PUBLIC_SCOPE else block.scope.hex(),
        index=block.index,
        tokens=len(block.tokens) // 4,
        layers=header.layers,
        dtype=header.dtype,
        payload_bytes=header.payload_bytes,
        created_ms=header.created_ms,
        expires_ms=header.expires_ms,
    )


def verified(control: SocketControl, secret: bytes | None, each_s: float) -> Verified:
    """Checks every block, with `secret` also that its key follows from its tokens; wrong ones are
    removed. Each block may take `each_s`."""
    right, wrong = 0, Counter[str]()
    for key in _pages(control, b"", _AT_ONCE, time.monotonic() + 1_000 * each_s):
        deadline = time.monotonic() + each_s
        if not (opened := control.open([key], deadline)):
            continue  # it has left meanwhile
        reason = _fault(control, key, opened[0], secret)
        control.release([opened[0].place])
        if reason is None:
            right += 1
        else:
            wrong[reason.value] += 1
            control.delete([key], deadline)
    return Verified(right, dict(wrong))


def _fault(
    control: SocketControl, key: bytes, opened: Opened, secret: bytes | None
) -> Reason | None:
    try:
        header = decode(opened.header)
    except BadBlockError as error:
        return error.reason
    block = header.block
    if block.key != key:
        return Reason.KEY
    if secret is not None and block_key(secret, block.parent, block.tokens) != key:
        return Reason.KEY
    # A copy is checked: the memory itself may be written to while it is looked at.
    copy = np.empty(opened.payload_bytes, np.uint8)
    slot = control.segment.slot(opened.place.offset, opened.payload_bytes)
    return None if copy_sums(copy, slot, header.layers) == header.sums else Reason.PAYLOAD
