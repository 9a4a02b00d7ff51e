"""S1: numbers that would spread from one member's report into every choice are not understood."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from events.errors import WireError
from events.load import ReplicaLoad
from events.peer import PeerMessage, PeerState, Sent
from events.wire import decode, encode
from tests.router.kit import load

LIMIT = 10_000


@pytest.mark.parametrize("value", [-1, -10_000, 1 << 62])
@pytest.mark.parametrize("name", ["prompt_tokens_total", "queued_prefill_tokens", "total_blocks"])
def test_S1_a_report_has_no_counts_that_can_not_be(name: str, value: int) -> None:
    with pytest.raises(WireError):
        decode(msgspec.msgpack.Decoder(ReplicaLoad), encode(load(**{name: value})), LIMIT)


@pytest.mark.parametrize("value", [-1.0, 1e300, float("inf"), float("nan")])
def test_S1_a_reservation_has_no_times_that_can_not_be(value: Any) -> None:
    sent = Sent(1, "r0", 1, 5, value, 5, 1)
    with pytest.raises(WireError):
        decode(msgspec.msgpack.Decoder(PeerMessage), encode(PeerState((sent,))), LIMIT)
