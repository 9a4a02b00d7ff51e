"""One logical block of the prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from replica.cache.evict import Run

Place = Literal["run", "own_run"]
"""Where a node knows its place in an eviction order: in that of all, in that of its tenant."""

NOBODY = ""
"""The owner of what several tenants use: nobody is charged for it."""


class Node:
    """`children` counts resident nodes whose parent this is; `copies` are the physical blocks that
    hold it. `depth`: how many blocks are before it. `reused`: a second request needed it. `tenant`
    is whose quota it counts for. `run` and `own_run` were its places when it was idle last."""

    __slots__ = (
        "children",
        "copies",
        "depth",
        "key",
        "own_run",
        "parent",
        "reused",
        "run",
        "tenant",
        "tokens",
    )

    def __init__(self, key: bytes, tokens: bytes, parent: Node | None, tenant: str) -> None:
        self.key = key
        self.tokens = tokens
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.tenant = tenant
        self.reused = False
        self.children = 0
        self.copies: list[int] = []
        self.run: Run | None = None
        self.own_run: Run | None = None
