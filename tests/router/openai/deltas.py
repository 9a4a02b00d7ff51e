"""CoreDeltas as a replica would send them, and the events that came of them."""

from __future__ import annotations

import json
from typing import Any

from events.errors import CoreError
from events.output import CoreDelta, CoreFinish, TokenLogprob, Usage

SERVER_LOST = CoreError(status=503, message="The replica was lost.", type="server_error", code="x")


def delta(
    text: str = "",
    *,
    child: int = 0,
    finish: str | None = None,
    error: CoreError | None = None,
    logprobs: tuple[TokenLogprob, ...] = (),
    ids: tuple[int, ...] = (),
    usage: Usage | None = None,
) -> CoreDelta:
    ended = None if finish is None else CoreFinish(reason=finish, error=error)
    return CoreDelta("r", 0, child, text, ids, logprobs, usage or Usage(7, 4, 3), ended)


def payloads(events: list[bytes]) -> list[Any]:
    """The data of each event; the string "[DONE]" stays one. Each event is one `data:` line."""
    found = []
    for event in events:
        assert event.startswith(b"data: ")
        assert event.endswith(b"\n\n")
        assert event.count(b"\n") == 2
        data = event[6:-2].decode()
        found.append(data if data == "[DONE]" else json.loads(data))
    return found
