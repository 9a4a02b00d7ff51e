"""Who a KV block is; hashing is here and in chainhash.py alone. Knows no tiers and no scheduling.

A block's key chains over everything before it, so an equal key means an equal prefix in an equal
namespace. The hash is keyed with the cluster's secret: no reader of the bus or of a store can test
for a known prompt. Golden vectors in tests/kvstore keep the bytes the same for ever.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NewType

import numpy as np

from events.load import KVLayout, ReplicaHello
from kvstore.chainhash import HASH_VERSION as HASH_VERSION
from kvstore.chainhash import KEY_BYTES, ChainHash, chain_hash, keyed_hash

PUBLIC_SALT = b""
"""The salt of blocks that every tenant may share."""
PUBLIC_SCOPE = bytes(KEY_BYTES)
"""The scope of blocks that every tenant may share."""
_ROOTS_KEPT = 2_048

BlockKey = NewType("BlockKey", bytes)


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal before two blocks with equal tokens may be taken for each other.
    `adapter`: name and content digest of the LoRA adapter that they were computed with."""

    model: str
    weights: str
    layout: KVLayout
    adapter: tuple[str, str] | None = None

    @classmethod
    def of_hello(cls, hello: ReplicaHello) -> Namespace:
        """The base namespace (no adapter) of the replica that sent `hello`."""
        return cls(model=hello.model, weights=hello.weights, layout=hello.layout)

    def adapted(self, adapter: tuple[str, str] | None) -> Namespace:
        """The same, of blocks that are computed with an adapter."""
        return self if adapter == self.adapter else replace(self, adapter=adapter)


class KeyChain:
    """The keys of the full blocks of one token sequence, and what the next block chains to.

    `data` holds the keys of `blocks` blocks back to back, 16 bytes each; `parent` is the chain
    value that the next full block hashes over; it differs from the last key only right behind a
    public prefix.
    """

    __slots__ = ("blocks", "data", "parent")

    def __init__(self, data: bytes, parent: bytes) -> None:
        self.blocks = len(data) // KEY_BYTES
        self.data = data
        self.parent = parent

    def __len__(self) -> int:
        return self.blocks

    def __getitem__(self, index: int) -> BlockKey:
        if not 0 <= index < self.blocks:
            raise IndexError(index)
        return BlockKey(self.data[index * KEY_BYTES : (index + 1) * KEY_BYTES])

    def __iter__(self) -> Iterator[BlockKey]:
        for start in range(0, len(self.data), KEY_BYTES):
            yield BlockKey(self.data[start : start + KEY_BYTES])

    def halves(self) -> np.ndarray:
        """The keys as uint64, shape (blocks, 2): what the digest's positions are made from."""
        return np.frombuffer(self.data, dtype="<u8").reshape(-1, 2)


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """All that must be equal before one block's KV may be used for another.

    `parent` is the chain value that the key hashes over. `namespace` is the root of the chain,
    `scope` says whose salt is in it (scope_id); blocks of a public prefix have PUBLIC_SCOPE and the
    public root. `tokens` are u32 little endian. `public_cut_blocks` is 0 within a public prefix.
    """

    key: BlockKey
    parent: bytes
    namespace: bytes
    scope: bytes
    index: int
    public_cut_blocks: int
    tokens: bytes


def key_id(cluster_key: bytes) -> str:
    """A public name for the secret, so that two ends can tell that they hold the same one."""
    return hashlib.blake2b(b"", digest_size=4, key=cluster_key, person=b"wr-key-id").hexdigest()


def _field(tag: bytes, value: str | int | bytes) -> bytes:
    """One field, tagged and length-framed, so that no two field lists give the same bytes."""
    data = value if isinstance(value, bytes) else str(value).encode()
    return struct.pack("<B", len(tag)) + tag + struct.pack("<I", len(data)) + data


def _adapter_field(adapter: tuple[str, str] | None) -> bytes:
    if adapter is None:
        return _field(b"no-adapter", b"")
    return _field(b"adapter", _field(b"id", adapter[0]) + _field(b"digest", adapter[1]))


@lru_cache(maxsize=_ROOTS_KEPT)
def root(cluster_key: bytes, namespace: Namespace, salt: bytes) -> bytes:
    """The chain value before the first block: 16 bytes."""
    layout = namespace.layout
    return keyed_hash(
        cluster_key,
        b"root",
        _field(b"model", namespace.model),
        _field(b"weights", namespace.weights),
        _field(b"dtype", layout.dtype),
        _field(b"layers", layout.layers),
        _field(b"kv_heads", layout.kv_heads),
        _field(b"head_dim", layout.head_dim),
        _field(b"block_tokens", layout.block_tokens),
        _field(b"rope", layout.rope),
        _adapter_field(namespace.adapter),
        _field(b"salt", salt),
    )


def block_key(cluster_key: bytes, parent: bytes, tokens: bytes) -> BlockKey:
    """key = H(parent || n as u32 || tokens as u32 little endian)."""
    return BlockKey(keyed_hash(cluster_key, parent, struct.pack("<I", len(tokens) // 4), tokens))


def private_parent(cluster_key: bytes, public_key: bytes, salt: bytes) -> bytes:
    """Where a tenant's own chain goes on behind the last full block of a public prefix."""
    return keyed_hash(cluster_key, b"salt", public_key, _field(b"scope", salt))


def chain(
    cluster_key: bytes,
    namespace: Namespace,
    salt: bytes,
    tokens: bytes,
    public_cut_blocks: int = 0,
    run: ChainHash | None = None,
) -> KeyChain:
    """Keys of all full blocks of `tokens` (u32 little endian), hashed by `run` where it is given.

    The first `public_cut_blocks` blocks are hashed without the tenant's salt. A partial block at
    the end gets no key: it is never shared. Raises ValueError when the cut lies behind the end.
    """
    block_bytes = 4 * namespace.layout.block_tokens
    blocks = len(tokens) // block_bytes
    if not 0 <= public_cut_blocks <= blocks:
        raise ValueError("the public prefix is longer than the prompt")
    run = chain_hash() if run is None else run
    cut = public_cut_blocks * block_bytes
    shared = b""
    parent = root(cluster_key, namespace, PUBLIC_SALT if cut else salt)
    if cut:
        shared = run(cluster_key, parent, tokens[:cut], block_bytes)
        parent = private_parent(cluster_key, shared[-KEY_BYTES:], salt)
    own = run(cluster_key, parent, tokens[cut:] if cut else tokens, block_bytes)
    return KeyChain(shared + own, own[-KEY_BYTES:] or parent)


@lru_cache(maxsize=_ROOTS_KEPT)
def scope_id(cluster_key: bytes, salt: bytes) -> bytes:
    """A name for the owner of a salt which does not give the salt away: 16 bytes."""
    if salt == PUBLIC_SALT:
        return PUBLIC_SCOPE
    return keyed_hash(cluster_key, b"scope", _field(b"salt", salt))


@dataclass(frozen=True, slots=True)
class Lineage:
    """What all blocks of one chain have in common, so that each of them can be named alone."""

    cluster_key: bytes
    salt: bytes
    public_cut_blocks: int
    public_root: bytes
    own_root: bytes
    scope: bytes

    @classmethod
    def of(cls, cluster_key: bytes, namespace: Namespace, salt: bytes, cut_blocks: int) -> Lineage:
        """Of the chains of one namespace, salt and public cut."""
        return cls(
            cluster_key=cluster_key,
            salt=salt,
            public_cut_blocks=cut_blocks,
            public_root=root(cluster_key, namespace, PUBLIC_SALT),
            own_root=root(cluster_key, namespace, salt),
            scope=scope_id(cluster_key, salt),
        )

    def identity(self, index: int, before: bytes, key: bytes, tokens: bytes) -> BlockIdentity:
        """Who block `index` is; `before` is the key of the block before it, if there is one."""
        cut = self.public_cut_blocks
        public = index < cut
        namespace = self.public_root if public else self.own_root
        if not index:
            parent = namespace
        elif index == cut:
            parent = private_parent(self.cluster_key, before, self.salt)
        else:
            parent = before
        return BlockIdentity(
            key=BlockKey(key),
            parent=parent,
            namespace=namespace,
            scope=PUBLIC_SCOPE if public else self.scope,
            index=index,
            public_cut_blocks=0 if public else cut,
            tokens=tokens,
        )


def identities(
    cluster_key: bytes,
    namespace: Namespace,
    salt: bytes,
    tokens: bytes,
    keys: KeyChain,
    public_cut_blocks: int = 0,
) -> list[BlockIdentity]:
    """Who each block of `keys` is, where `keys` is the chain of `tokens` with the same cut.

    Raises ValueError when the tokens are too few, or the cut lies behind the end.
    """
    size, cut = 4 * namespace.layout.block_tokens, public_cut_blocks
    if len(tokens) < size * len(keys) or not 0 <= cut <= len(keys):
        raise ValueError("the chain is not of these tokens")
    lineage = Lineage.of(cluster_key, namespace, salt, cut)
    befores = (b"", *keys)
    return [
        lineage.identity(index, befores[index], key, tokens[index * size : (index + 1) * size])
        for index, key in enumerate(keys)
    ]
