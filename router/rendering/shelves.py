"""Token ids of texts as JSON writes them: what is known is found without decoding it, in one native
call for a whole prompt. As Pieces, which decodes all of it, and is used where this can't be.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec

from configs.model.tokenizer import Tokenizer
from configs.native import CompileError, NativeSource, declare, load_object
from router.openai.contents import Written
from router.rendering.outline import Outline
from router.rendering.pieces import LARGE_CHARS, MANY_PIECES, SMALL_CHARS, TAIL_CHARS
from router.rendering.turns import Turns

log = logging.getLogger(__name__)

KERNELS = NativeSource(
    "shelves", Path(__file__).parent, ("shelves.cpp",), ("markers.h", "../../kvstore/recent.h")
)

_part, _pair = struct.Struct("=4q"), struct.Struct("=2q")
_IDS, _TEXT, _CONTENT = range(3)
_NO_TURN = bytes(_pair.size)
_MUST_BE_ESCAPED = frozenset('"\\') | frozenset(map(chr, range(0x20)))


class _Result(ctypes.Structure):
    """What the kernel has found, as shelves.cpp lays it out."""

    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("ids_bytes", ctypes.c_int64),
        ("missing", ctypes.c_void_p),
    )


class Plan:
    """An Outline as the kernel reads it. `turns`: the numbers of contents that may be turns."""

    def __init__(self, outline: Outline, prefix: str) -> None:
        """`prefix`: of a turn. Raises ValueError where a turn may be more than one content."""
        self.turns: list[int] = []
        self._kept: list[bytes] = []
        parts: list[bytes] = []
        for part in outline.parts:
            if isinstance(part, bytes):
                parts.append(self._pointing(part, _IDS))
                continue
            hole, may_be_turn = part
            pieces = hole.parts()
            before = pieces[0] if isinstance(pieces[0], str) else ""
            if may_be_turn and (before.startswith(prefix) or prefix.startswith(before)):
                number = pieces[-1]
                if not isinstance(number, int) or pieces[:-1] != [prefix] * bool(prefix):
                    raise ValueError("more than a content may be a turn")
                self.turns.append(number)
            for piece in pieces:
                if isinstance(piece, int):
                    parts.append(_part.pack(0, 0, _CONTENT, piece))
                else:
                    parts.append(self._pointing(msgspec.json.encode(piece)[1:-1], _TEXT))
        self.parts = b"".join(parts)
        self.count = len(parts)

    def _pointing(self, data: bytes, kind: int) -> bytes:
        self._kept.append(data)
        return _part.pack(_address(data), len(data), kind, 0)


class Shelves:
    """One per model, bounded as a TextCache is. Event loop only."""

    def __init__(
        self,
        library: ctypes.CDLL,
        tokenizer: Tokenizer,
        markers: Sequence[str],
        max_bytes: int,
        max_tenant_bytes: int,
    ) -> None:
        sizes = (LARGE_CHARS, SMALL_CHARS, TAIL_CHARS) if tokenizer.cuts else (0, 0, 0)
        seed = int.from_bytes(os.urandom(8), "little")
        bounds = (max_bytes, max_tenant_bytes, *sizes, tokenizer.cuts_digits, MANY_PIECES)
        self._native = library.wr_shelves_new(*bounds, seed)
        weakref.finalize(self, library.wr_shelves_free, self._native)
        for marker in markers:
            spelling = marker.encode()
            library.wr_shelves_mark(self._native, spelling, len(spelling))
        self._library = library
        self._result = _Result.from_address(library.wr_shelves_result(self._native))

    @property
    def size_bytes(self) -> int:
        """Of all that is known."""
        size: int = self._library.wr_shelves_bytes(self._native)
        return size

    def join(
        self, tenant: str, plan: Plan, messages: Written, turns: dict[int, bytes]
    ) -> list[bytes] | None:
        """Texts whose ids are missing: `fill` them in before anything else happens. None where the
        messages may hold a part of a marker. `turns`: ids of those that were generated."""
        name = tenant.encode()
        told = None
        if turns:
            told = b"".join(
                _pair.pack(_address(ids), len(ids)) if (ids := turns.get(number)) else _NO_TURN
                for number in range(len(messages))
            )
        count = self._library.wr_shelves_join(
            self._native, name, len(name), plan.parts, plan.count, messages.body, messages.spans,
            told,
        )  # fmt: skip
        if count < 0:
            return None
        places = ctypes.string_at(self._result.missing, _pair.size * count) if count else b""
        return [ctypes.string_at(at, size) for at, size in _pair.iter_unpack(places)]

    def fill(self, ids: Sequence[bytes]) -> bytes:
        """Remember the ids of what was missing; all of the prompt's."""
        sizes = struct.pack(f"={len(ids)}q", *map(len, ids))
        self._library.wr_shelves_fill(self._native, b"".join(ids), sizes)
        return self.ids()

    def ids(self) -> bytes:
        """Of the prompt that was joined, as u32 little endian, where nothing was missing."""
        return ctypes.string_at(self._result.ids, self._result.ids_bytes)

    def put(self, tenant: str, text: bytes, ids: bytes) -> None:
        """Remember the ids of a text."""
        name = tenant.encode()
        self._library.wr_shelves_put(
            self._native, name, len(name), text, len(text), ids, len(ids)
        )  # fmt: skip


def read(text: bytes) -> str:
    """A piece of a JSON string."""
    if b"\\" not in text:
        return text.decode()
    found: str = msgspec.json.decode(b'"%b"' % text)
    return found


def plan_of(outline: Outline, turns: Turns) -> Plan | None:
    """The outline's plan, if there can be one."""
    try:
        return Plan(outline, turns.prefix)
    except ValueError:
        return None


def shelves_for(
    tokenizer: Tokenizer, markers: Sequence[str], max_bytes: int, max_tenant_bytes: int
) -> Shelves | None:
    """None without a compiler, or where a marker is written in another way in JSON."""
    library = _library()
    if library is None or not all(map(_MUST_BE_ESCAPED.isdisjoint, markers)):
        return None
    return Shelves(library, tokenizer, markers, max_bytes, max_tenant_bytes)


def _address(data: bytes) -> int:
    """Where it lies; it must outlive the call that gets it."""
    return ctypes.cast(data, ctypes.c_void_p).value or 0


@cache
def _library() -> ctypes.CDLL | None:
    pointer, long, data = ctypes.c_void_p, ctypes.c_long, ctypes.c_char_p
    try:
        library = load_object(KERNELS, quick=True)
    except CompileError as error:
        log.warning("no native shelves of texts, prompts are decoded whole: %s", error)
        return None
    declare(
        library,
        {
            "wr_shelves_free": [pointer],
            "wr_shelves_mark": [pointer, data, long],
            "wr_shelves_fill": [pointer, data, data],
            "wr_shelves_put": [pointer, data, long, data, long, data, long],
        },
    )
    make = {"wr_shelves_new": [long] * 7 + [ctypes.c_uint64], "wr_shelves_result": [pointer]}
    declare(library, make, pointer)
    join = [pointer, data, long, data, long, data, data, data]
    declare(library, {"wr_shelves_join": join, "wr_shelves_bytes": [pointer]}, long)
    return library


if __name__ == "__main__":
    _library()
