"""One logical block of the prefix cache."""

from __future__ import annotations

NOBODY = ""
"""The owner of what several tenants use: nobody is charged for it."""


class Node:
    """`children` counts resident nodes whose parent this is; `copies` are the physical blocks that
    hold it. `reused`: a second request needed it. `tenant` is whose quota it counts for."""

    __slots__ = ("children", "copies", "key", "parent", "reused", "tenant", "tokens")

    def __init__(self, key: bytes, tokens: bytes, parent: Node | None, tenant: str) -> None:
        self.key = key
        self.tokens = tokens
        self.parent = parent
        self.tenant = tenant
        self.reused = False
        self.children = 0
        self.copies: list[int] = []
