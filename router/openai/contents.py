"""The texts of a chat's messages where a JSON body has them: found in one native pass, and decoded
only where somebody looks at them. Without a compiler whoever reads the body decodes all of it."""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, overload

import msgspec

from configs.native import CompileError, NativeSource, declare, load_object

log = logging.getLogger(__name__)

KERNELS = NativeSource("contents", Path(__file__).parent, ("contents.cpp",))

_span = struct.Struct("=2q")
SPAN_BYTES = _span.size

MAX_CONTENTS = 128
MAX_REDUCED_BYTES = 16 * 1024


class Contents(NamedTuple):
    """`reduced` is the body with "" instead of each content; `spans`: where these start and end in
    the body, without their quotation marks, one after the other as int64."""

    reduced: bytes
    spans: bytes


class Written(Sequence[dict[str, Any]]):
    """Plain messages as they are written in `body`, whose contents stand at `spans`: no escape by
    number is in them."""

    __slots__ = ("_made", "body", "roles", "spans")

    def __init__(self, body: bytes, roles: tuple[str, ...], spans: bytes) -> None:
        self.body = body
        self.roles = roles
        self.spans = spans
        self._made: list[dict[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self.roles)

    def __eq__(self, other: object) -> bool:
        return self._messages() == (other._messages() if isinstance(other, Written) else other)

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._messages())

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        return self._messages()[index]

    def content(self, number: int) -> str:
        """The text of one message."""
        start, end = _span.unpack_from(self.spans, SPAN_BYTES * number)
        text: str = msgspec.json.decode(self.body[start - 1 : end + 1])
        return text

    def _messages(self) -> list[dict[str, Any]]:
        if self._made is None:
            self._made = [
                {"role": role, "content": self.content(number)}
                for number, role in enumerate(self.roles)
            ]
        return self._made


Find = Callable[[bytes], Contents | None]
"""The contents of a body, None where they can't be told in one pass. Event loop only."""


def native_contents() -> Find:
    """Compiled from contents.cpp. Raises CompileError."""
    pointer, long = ctypes.c_void_p, ctypes.c_long
    signatures = {"wr_contents": [ctypes.c_char_p, long, pointer, long, pointer, pointer, long]}
    find = declare(load_object(KERNELS, quick=True), signatures, long).wr_contents
    reduced = ctypes.create_string_buffer(MAX_REDUCED_BYTES)
    reduced_bytes, spans = ctypes.c_int64(), ctypes.create_string_buffer(SPAN_BYTES * MAX_CONTENTS)
    size = ctypes.pointer(reduced_bytes)

    def contents(body: bytes) -> Contents | None:
        found = find(body, len(body), reduced, MAX_REDUCED_BYTES, size, spans, MAX_CONTENTS)
        if found < 0:
            return None
        told = ctypes.string_at(spans, SPAN_BYTES * found)
        return Contents(ctypes.string_at(reduced, reduced_bytes.value), told)

    return contents


def _nothing(_: bytes) -> None:
    """Without a compiler."""


@cache
def contents_of() -> Find:
    """The fastest there is here; compiles it at the first call on a machine."""
    try:
        return native_contents()
    except CompileError as error:
        log.warning("no native contents, bodies are decoded whole: %s", error)
        return _nothing


if __name__ == "__main__":
    contents_of()
