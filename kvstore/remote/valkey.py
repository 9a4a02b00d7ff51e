"""Blocks in Valkey or Redis, alone or in a cluster: one value per block, header and payload in one.

A value is written whole or not at all (SET NX PX), so nothing half-written is ever visible. The
store's TTL says how long a block nobody asks for takes room; asking for a chain renews all of it,
so that it doesn't lose its head first. A block's own header says nothing of an end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import hiredis

from kvstore.block import MAX_HEADER_BYTES, Whose, belongs
from kvstore.connector import AWAY, ConnectorTier, Limits, Settle, whole_header
from kvstore.remote.endpoint import Endpoint
from kvstore.remote.nodes import Doors, Errors, Nodes
from kvstore.remote.resp import Command, Odd, RespConnection, Value
from kvstore.tier import MISS, PRESENT, STORED, WRONG_SIZE, Caps, Outcome, Read, Write, failed, hit

PREFIX = b"wr1:"
MAX_VALUE_BYTES = 256 * 1024 * 1024
"""Half of what a server takes as one value."""
DEFAULT_TTL_S = 24 * 3600.0
SCAN_COUNT = 256
_REASONS = {"OOM": failed("full"), "CLUSTERDOWN": AWAY, "LOADING": AWAY, "MASTERDOWN": AWAY}
_REFUSED = failed("refused")


def valkey_tier(
    endpoint: Endpoint, ttl_s: float | None = DEFAULT_TTL_S, limits: Limits | None = None
) -> ConnectorTier:
    """`ttl_s` None lets blocks live until the server evicts them."""
    caps = Caps(
        name="valkey",
        max_value_bytes=MAX_VALUE_BYTES,
        trusted=False,
        shared=True,
    )
    return ConnectorTier(caps, partial(ValkeySession, Doors(endpoint), ttl_s), limits)


class ValkeySession:
    """One thread's connections; see connector.Session."""

    def __init__(self, doors: Doors, ttl_s: float | None, deadline: float) -> None:
        self._ttl_s = ttl_s
        self._nodes = Nodes(doors, deadline)

    def read(self, reads: Sequence[Read], deadline: float, settle: Settle) -> None:
        """GET into the callers' memory."""

        def ask(node: RespConnection, places: Sequence[int], asking: bool) -> Errors:
            errors: dict[int, hiredis.ReplyError] = {}

            def landed(index: int, what: Value | Odd | hiredis.ReplyError | None) -> None:
                if isinstance(what, hiredis.ReplyError):
                    errors[places[index]] = what
                else:
                    settle(places[index], _read_outcome(what))

            names = [_name(reads[place].key) for place in places]
            into = [reads[place].into for place in places]
            node.get_into(names, into, whole_header, deadline, landed, asking)
            return errors

        names = [_name(read.key) for read in reads]
        for place, error in self._nodes.spread(names, ask, deadline).items():
            settle(place, _refusal(error))

    def write(self, writes: Sequence[Write], deadline: float, settle: Settle) -> None:
        """SET what is not there."""
        names = [_name(write.key) for write in writes]
        commands = [self._set(name, write) for name, write in zip(names, writes, strict=True)]

        def stored(place: int, reply: Any) -> None:
            settle(place, PRESENT if reply is None else STORED)

        for place, error in self._each(names, commands, deadline, stored).items():
            settle(place, _refusal(error))

    def exists_prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """Asks for all of them at once, and renews the time of those that are there."""
        there = [False] * len(keys)

        def found(place: int, reply: Any) -> None:
            there[place] = reply == 1

        names = [_name(key) for key in keys]
        self._each(names, [self._renew(name) for name in names], deadline, found)
        return there.index(False) if False in there else len(keys)

    def delete(self, keys: Sequence[bytes], deadline: float) -> None:
        """UNLINK: the server frees the memory aside."""
        names = [_name(key) for key in keys]
        self._each(names, [(b"UNLINK", name) for name in names], deadline, lambda *_: None)

    def purge(self, whose: Whose, deadline: float) -> int:
        """Looks into the header of every block on every node: rare, and exact."""
        return sum(_purge(node, whose, deadline) for node in self._nodes.all(deadline))

    def interrupt(self) -> None:
        """Wakes whoever waits for a node."""
        self._nodes.interrupt()

    def close(self) -> None:
        """All connections."""
        self._nodes.close()

    def _each(
        self,
        names: Sequence[bytes],
        commands: Sequence[Command],
        deadline: float,
        answered: Callable[[int, Any], None],
    ) -> Errors:
        """Every command at the owner of its key; what is no error goes to `answered`."""

        def ask(node: RespConnection, places: Sequence[int], asking: bool) -> Errors:
            errors: dict[int, hiredis.ReplyError] = {}
            replies = node.pipeline([commands[place] for place in places], deadline, asking)
            for place, reply in zip(places, replies, strict=True):
                if isinstance(reply, hiredis.ReplyError):
                    errors[place] = reply
                else:
                    answered(place, reply)
            return errors

        return self._nodes.spread(names, ask, deadline)

    def _set(self, name: bytes, write: Write) -> Command:
        ttl_s = self._ttl_s if write.ttl_s is None else write.ttl_s
        until = () if ttl_s is None else (b"PX", _ms(ttl_s))
        return (b"SET", name, (write.header, write.payload), b"NX", *until)

    def _renew(self, name: bytes) -> Command:
        return (b"EXISTS", name) if self._ttl_s is None else (b"PEXPIRE", name, _ms(self._ttl_s))


def _purge(node: RespConnection, whose: Whose, deadline: float) -> int:
    gone, cursor = 0, b"0"
    while True:
        scan = (b"SCAN", cursor, b"MATCH", PREFIX + b"*", b"COUNT", b"%d" % SCAN_COUNT)
        cursor, names = node.call(*scan, deadline=deadline)
        last = b"%d" % (MAX_HEADER_BYTES - 1)
        heads = node.pipeline([(b"GETRANGE", name, b"0", last) for name in names], deadline)
        own = [name for name, head in zip(names, heads, strict=True) if _theirs(head, whose)]
        gone += _count(node.pipeline([(b"UNLINK", name) for name in own], deadline))
        if cursor == b"0":
            return gone


def _theirs(head: object, whose: Whose) -> bool:
    return isinstance(head, bytes) and belongs(head, whose)


def _count(replies: Iterable[object]) -> int:
    return sum(reply for reply in replies if isinstance(reply, int))


def _read_outcome(what: Value | Odd | None) -> Outcome:
    if what is None:
        return MISS
    return hit(what.head) if isinstance(what, Value) else WRONG_SIZE


def _refusal(error: hiredis.ReplyError) -> Outcome:
    return _REASONS.get(str(error).partition(" ")[0], _REFUSED)


def _name(key: bytes) -> bytes:
    return PREFIX + key.hex().encode()


def _ms(seconds: float) -> bytes:
    return b"%d" % max(1, round(seconds * 1_000))
