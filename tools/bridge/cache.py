"""What one engine of another kind has cached by its own hashes, and which of our keys that is.

Pure state: events in, changes of residency out, into the journal. Blocks are counted per copy: an
engine may hold one twice, and is told to have lost it only with the last. What depends on more than
tokens and a tenant's tag (adapters, images, other salts) is followed but never advertised.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from events.kvevents import (
    DEVICE,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineHash,
    KVEvent,
)
from kvstore.identity import Namespace, block_key, root
from replica.cache.journal import Journal
from router.tenancy.tenants import tag_salt
from tools.errors import CommandError

MAX_BLOCKS = 4_000_000
MAX_WAITING = 65_536
_TAG = re.compile(r"[0-9a-f]{32}")

Keys = tuple[bytes, ...]
"""Of one block: one for each tenant scope that would hit it; none where it is not advertised."""


@dataclass(slots=True)
class _Held:
    keys: Keys
    copies: int = 1


@dataclass(slots=True)
class _Waiting:
    """A block whose parent is not known yet."""

    parent: EngineHash
    tokens: bytes
    plain: bool
    copies: int = 1


class EngineCache:
    """One life of one engine. `salts` are those of the scopes that may hit an unsalted block:
    none, where each tenant of ours has its own salt there."""

    def __init__(
        self, cluster_key: bytes, namespace: Namespace, salts: Sequence[bytes], journal: Journal
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._cluster_key = cluster_key
        self._namespace = namespace
        self._block_tokens = namespace.layout.block_tokens
        self._open_roots = tuple(root(cluster_key, namespace, salt) for salt in salts)
        self._journal = journal
        self._held: dict[EngineHash, _Held] = {}
        self._waiting: dict[EngineHash, _Waiting] = {}
        self._children: dict[EngineHash, list[EngineHash]] = {}

    def __len__(self) -> int:
        return len(self._held) + len(self._waiting)

    @property
    def waiting(self) -> int:
        """Blocks whose parent never came, so far."""
        return len(self._waiting)

    def apply(self, events: Iterable[KVEvent]) -> None:
        """Events in the engine's order. Raises CommandError when its block size is not ours."""
        for event in events:
            if isinstance(event, BlocksCleared):
                self.clear()
            elif event.medium.upper() != DEVICE or event.group:
                self.counts["other_tier"] += 1
            elif isinstance(event, BlocksRemoved):
                for name in event.hashes:
                    self._remove(name)
            else:
                self._store(event)

    def clear(self) -> None:
        """Nothing is cached, or nothing is known of it any more."""
        self._held.clear()
        self._waiting.clear()
        self._children.clear()
        self._journal.cleared()

    def _store(self, event: BlocksStored) -> None:
        if event.block_size != self._block_tokens:
            raise CommandError(
                f"the engine's blocks have {event.block_size} tokens, those of the cluster file "
                f"{self._block_tokens}: set block_tokens = {event.block_size} for this backend"
            )
        if len(self) + len(event.hashes) > MAX_BLOCKS:
            self.counts["overflow"] += 1
            self.clear()
        parent, size = event.parent, event.block_size
        for index, (name, extra) in enumerate(zip(event.hashes, event.extra_keys, strict=True)):
            tokens = _packed(event.token_ids[index * size : (index + 1) * size])
            plain = not event.adapter and tokens != b""
            self._store_one(name, parent, tokens, extra, plain)
            parent = name

    def _store_one(
        self, name: EngineHash, parent: EngineHash | None, tokens: bytes, extra: Any, plain: bool
    ) -> None:
        known = self._held.get(name) or self._waiting.get(name)
        if known is not None:
            known.copies += 1
        elif parent is None:
            self._hold(name, self._roots(extra) if plain else (), tokens, 1)
        elif parent in self._held:
            parents = self._held[parent].keys if plain and extra is None else ()
            self._hold(name, parents, tokens, 1)
        else:
            self._wait(name, _Waiting(parent, tokens, plain and extra is None))

    def _roots(self, extra: Any) -> Keys:
        """What the first block of a prompt chains to."""
        if extra is None:
            return self._open_roots
        tag = _tag_of(extra)
        if tag is None:
            self.counts["not_advertised"] += 1
            return ()
        return (root(self._cluster_key, self._namespace, tag_salt(self._cluster_key, tag)),)

    def _hold(self, name: EngineHash, parents: Keys, tokens: bytes, copies: int) -> None:
        """Take the block in, and whoever waited for it."""
        pending = [(name, parents, tokens, copies)]
        while pending:
            name, parents, tokens, copies = pending.pop()
            keys = tuple(block_key(self._cluster_key, parent, tokens) for parent in parents)
            self._held[name] = _Held(keys, copies)
            for key in keys:
                self._journal.stored(key)
            for child in self._children.pop(name, ()):
                waiting = self._waiting.pop(child, None)
                if waiting is not None:
                    parents = keys if waiting.plain else ()
                    pending.append((child, parents, waiting.tokens, waiting.copies))

    def _wait(self, name: EngineHash, waiting: _Waiting) -> None:
        """Its parent may come yet: from a replay, or out of order."""
        if len(self._waiting) >= MAX_WAITING:
            self.counts["waiting_dropped"] += 1
            self._forget_waiting(next(iter(self._waiting)))
        self._waiting[name] = waiting
        self._children.setdefault(waiting.parent, []).append(name)

    def _remove(self, name: EngineHash) -> None:
        block = self._held.get(name) or self._waiting.get(name)
        if block is None:
            self.counts["unknown_removed"] += 1
            return
        block.copies -= 1
        if block.copies:
            return
        if isinstance(block, _Held):
            del self._held[name]
            for key in block.keys:
                self._journal.removed(key)
        else:
            self._forget_waiting(name)

    def _forget_waiting(self, name: EngineHash) -> None:
        parent = self._waiting.pop(name).parent
        siblings = self._children[parent]
        siblings.remove(name)
        if not siblings:
            del self._children[parent]


def _packed(tokens: tuple[int, ...]) -> bytes:
    """As u32 little endian; empty where they are no token ids."""
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error:
        return b""


def _tag_of(extra: Any) -> str | None:
    """The tag in the extra keys of a first block, when it is the only thing there."""
    if not isinstance(extra, list) or len(extra) != 1:
        return None
    (value,) = extra
    if isinstance(value, list) and len(value) == 2 and value[0] == "cache_salt":
        value = value[1]
    return value if isinstance(value, str) and _TAG.fullmatch(value) else None
