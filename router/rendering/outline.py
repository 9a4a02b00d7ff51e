"""What a chat template writes around the texts of plain messages, as token ids: made once for each
order of roles, so that only the texts themselves are left to be looked at."""

from __future__ import annotations

from collections.abc import Sequence

from configs.model.segment import Segment
from configs.model.skeleton import Hole, Skeleton
from configs.model.tokenizer import Tokenizer
from router.rendering.textcache import pack
from router.rendering.turns import Turns


class Outline:
    """Nothing merges across a marker, so what lies between two of them has ids of its own.

    `parts`: ids (u32 little endian), and texts, of which each may be a turn that was generated, or
    not."""

    def __init__(self, skeleton: Skeleton, tokenizer: Tokenizer, turns: Turns) -> None:
        self._turns = turns
        self.parts: list[bytes | tuple[Hole, bool]] = []
        before: list[Segment | None] = []
        for part in skeleton.parts:
            if isinstance(part, Segment):
                self._add(pack(tokenizer.encode_segments([part])))
                before.append(part)
            else:
                self.parts.append((part, turns.opens(before)))
                before.append(None)

    def pieces(self, contents: Sequence[str], tenant: str) -> list[bytes | str]:
        """Ids (u32 little endian) and texts, in order, of messages with these contents."""
        pieces: list[bytes | str] = []
        for part in self.parts:
            if isinstance(part, bytes):
                pieces.append(part)
                continue
            hole, may_be_turn = part
            text = hole.filled(contents)
            turn = self._turns.known(tenant, text) if may_be_turn else None
            if turn is None:
                pieces.append(text)
            else:
                pieces += turn
        return pieces

    def _add(self, ids: bytes) -> None:
        if self.parts and isinstance(self.parts[-1], bytes):
            self.parts[-1] += ids
        else:
            self.parts.append(ids)
