"""Request bodies: half a shared system prompt, half a user's own text, and a tail nobody has seen.

The text is the standard library's own manual: prose and code, the same on every machine.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

MODEL = "bench"
SIZES = {"2k": 2 * 1024, "64k": 64 * 1024}
USERS = 64
TAIL_CHARS = 20
_CORPUS = "\n".join(topics.values()).encode("ascii", "ignore").decode()


@dataclass(frozen=True, slots=True)
class Template:
    """One user's request but for its tail: everything before and behind it, head included."""

    before: bytes
    behind: bytes

    def request(self, tail: bytes) -> bytes:
        """The bytes for the socket; `tail` has `TAIL_CHARS` bytes."""
        return b"%b%b%b" % (self.before, tail, self.behind)


def _own_text(user: int, chars: int) -> str:
    start = (user + 1) * 7_001 % (len(_CORPUS) - chars)
    return f"User {user} asks:\n{_CORPUS[start : start + chars]}\nNumber "


def templates(size_bytes: int, stream: bool, max_tokens: int) -> list[Template]:
    """One for each user; bodies of about `size_bytes`."""
    half = size_bytes // 2
    mark = "@" * TAIL_CHARS
    found = []
    for user in range(USERS):
        messages = [
            {"role": "system", "content": _CORPUS[:half]},
            {"role": "user", "content": _own_text(user, half) + mark},
        ]
        asked = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": max_tokens,
            "stream": stream,
            "temperature": 0.0,
        }
        body = json.dumps(asked).encode()
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n"
            b"User-Agent: bench\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        ) % len(body)
        before, behind = (head + body).split(mark.encode())
        found.append(Template(before, behind))
    return found


def requests(kinds: list[Template]) -> Iterator[bytes]:
    """For ever: users in turn, no tail twice."""
    for number in itertools.count():
        yield kinds[number % len(kinds)].request(b"%020d" % (number * 7_919))
