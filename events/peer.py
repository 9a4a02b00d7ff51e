"""What routers tell each other: what each has just sent where, until load reports show it; what
will come there when its prompt is computed; what its tenants use of their limits and have inside.

Nothing here holds prompts, tokens, tenants, salts or whole block keys.
"""

from __future__ import annotations

import msgspec

from events.numbers import Amount, Count


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """One dispatch that the sender knows of no load report to include.

    `seq` is its number among the router's dispatches, `replica_boot` the life that it went to.
    `blocks` is the KV that it will need beyond what is cached. `marks` holds eight bytes of the
    (keyed) block key at some depths of the prompt: enough to follow it with a sibling.
    """

    seq: Count
    replica: str
    replica_boot: Count
    prefill_tokens: Count
    prefill_ms: Amount
    context_tokens: Count
    blocks: Count
    prefilling: bool = True
    marks: bytes = b""


class Used(msgspec.Struct, frozen=True, array_like=True):
    """What a tenant has used at the sender since its last message. `tenant` is a keyed hash of its
    name. Requests and tokens are of its limits; tokens may be given back, and then are negative.
    `work_tokens` is prefill that was placed for it: its turns elsewhere come that much later."""

    tenant: bytes
    requests: int
    tokens: int
    work_tokens: Count = 0


class Inside(msgspec.Struct, frozen=True, array_like=True):
    """What a tenant has at the sender now: requests inside where their number is limited, and what
    waits for its turn. `tenant` is a keyed hash of its name."""

    tenant: bytes
    requests: Count = 0
    queued: Count = 0
    queued_tokens: Count = 0


class Pledged(msgspec.Struct, frozen=True, array_like=True):
    """Requests whose prompts are being computed elsewhere now, for a replica to answer, and the KV
    blocks that they bring."""

    replica: str
    requests: Count = 0
    blocks: Count = 0


class PeerDelta(msgspec.Struct, frozen=True, array_like=True, tag="delta"):
    """What happened since the sender's last message; the numbers are those of `Sent.seq`. `inside`
    has the tenants of which it changed, `pledged` the replicas."""

    sent: tuple[Sent, ...] = ()
    prefilled: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    used: tuple[Used, ...] = ()
    inside: tuple[Inside, ...] = ()
    pledged: tuple[Pledged, ...] = ()


class PeerState(msgspec.Struct, frozen=True, array_like=True, tag="state"):
    """Everything that the sender has on its way, pledged and inside now: what is not in it is over.
    `used` is since the last message all the same."""

    sent: tuple[Sent, ...] = ()
    used: tuple[Used, ...] = ()
    inside: tuple[Inside, ...] = ()
    pledged: tuple[Pledged, ...] = ()


class PeerAsk(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """The sender has missed something, or has just come: everybody's state is wanted."""


PeerMessage = PeerDelta | PeerState | PeerAsk
