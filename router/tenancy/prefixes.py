"""Public prefixes: heads of prompts that all tenants may share. Registered by operators only."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from events.errors import CoreError, UserError

MAX_PREFIXES = 256
MAX_PREFIX_TOKENS = 131_072
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class PublicPrefix:
    """`tokens` is u32 little endian; only whole blocks of it are ever shared."""

    name: str
    version: int
    tokens: bytes

    @property
    def length_tokens(self) -> int:
        """How many tokens were registered."""
        return len(self.tokens) // TOKEN_BYTES


class PublicPrefixes:
    """A bounded list; `version` rises with every change, so that copies can be compared."""

    def __init__(self, cluster_key: bytes) -> None:
        self.version = 0
        self._cluster_key = cluster_key
        self._prefixes: dict[bytes, PublicPrefix] = {}
        self._heads: dict[int, tuple[int, list[tuple[int, set[bytes]]]]] = {}

    def __iter__(self):
        return iter(self._prefixes.values())

    def __len__(self) -> int:
        return len(self._prefixes)

    def add(self, tokens: bytes) -> PublicPrefix:
        """Register a head; again is the same. Raises UserError (400)."""
        known = self._prefixes.get(tokens)
        if known is not None:
            return known
        if not tokens or len(tokens) > TOKEN_BYTES * MAX_PREFIX_TOKENS:
            raise _refusal(f"a public prefix has 1 to {MAX_PREFIX_TOKENS} tokens")
        if len(self._prefixes) >= MAX_PREFIXES:
            raise _refusal(f"there are {MAX_PREFIXES} public prefixes already")
        self.version += 1
        prefix = PublicPrefix(self._name(tokens), self.version, tokens)
        self._prefixes[tokens] = prefix
        return prefix

    def remove(self, name: str) -> bool:
        """Nobody shares it from now on: what was computed under it is not found any more, and ages
        out. Whether there was one of that name."""
        found = [tokens for tokens, prefix in self._prefixes.items() if prefix.name == name]
        for tokens in found:
            del self._prefixes[tokens]
            self.version += 1
        return bool(found)

    def _name(self, tokens: bytes) -> str:
        """The same on every router, and no way to test for a text."""
        digest = hmac.digest(self._cluster_key, b"wr-public-1\0" + tokens, "sha256")
        return f"public-{digest[:6].hex()}"

    def cut_blocks(self, prompt: bytes, block_tokens: int) -> int:
        """Full blocks at the head of `prompt` that are those of the longest registered prefix."""
        for length, heads in self._heads_of(block_tokens):
            if prompt[:length] in heads:
                return length // (TOKEN_BYTES * block_tokens)
        return 0

    def _heads_of(self, block_tokens: int) -> list[tuple[int, set[bytes]]]:
        """(bytes, whole-block heads of that many bytes), longest first; made once per change."""
        version, heads = self._heads.get(block_tokens, (0, []))
        if version != self.version:
            block_bytes = TOKEN_BYTES * block_tokens
            by_length: dict[int, set[bytes]] = {}
            for tokens in self._prefixes:
                length = len(tokens) - len(tokens) % block_bytes
                if length:
                    by_length.setdefault(length, set()).add(tokens[:length])
            heads = sorted(by_length.items(), reverse=True)
            self._heads[block_tokens] = (self.version, heads)
        return heads


def _refusal(message: str) -> UserError:
    return UserError(CoreError(status=400, message=message, code="invalid_value"))
