"""The nodes of one RESP store and who of them owns a key: one node, or a cluster's redirections.

A cluster's slots are learnt at the start and from every MOVED; ASK counts for one request. Any node
that was met is a way in, so that the one that was named may leave. Knows no commands but those of
the cluster.
"""

from __future__ import annotations

import binascii
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import hiredis

from kvstore.remote.endpoint import Endpoint
from kvstore.remote.resp import RespConnection, RespError

NODES_MAX = 256
ROUNDS_MAX = 5
SLOTS = 16_384

Address = tuple[str, int]
Errors = Mapping[int, hiredis.ReplyError]
Ask = Callable[[RespConnection, Sequence[int], bool], Errors]
"""Do it for these places at this node; which of them got errors. True: each behind an ASKING."""


class Doors:
    """Where to come in: the next one after each failure. Sessions of one store share them."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._ring: deque[Address] = deque([(endpoint.host, endpoint.port)])

    @property
    def first(self) -> Address:
        """To be tried now."""
        return self._ring[0]

    def shut(self) -> None:
        """Nobody came in there."""
        self._ring.rotate(-1)

    def met(self, addresses: Iterable[Address]) -> None:
        """Nodes of the cluster; the named one stays a way in for good."""
        named = (self.endpoint.host, self.endpoint.port)
        self._ring = deque(dict.fromkeys((self.first, named, *addresses)), NODES_MAX)


class Nodes:
    """Connections of one thread. Raises OSError from every method."""

    def __init__(self, doors: Doors, deadline: float) -> None:
        self._endpoint = doors.endpoint
        self._home = doors.first
        self._owners: dict[int, Address] = {}
        self._open: dict[Address, RespConnection] = {}
        try:
            home = self.at(self._home, deadline)
            self._clustered = home.server.get("mode") == "cluster"
            if self._clustered:
                self._learn(home.call(b"CLUSTER", b"SLOTS", deadline=deadline))
                doors.met(self._owners.values())
        except BaseException:
            doors.shut()
            self.close()
            raise

    def all(self, deadline: float) -> list[RespConnection]:
        """Of every node that owns slots."""
        addresses = set(self._owners.values()) or {self._home}
        return [self.at(address, deadline) for address in addresses]

    def at(self, address: Address, deadline: float) -> RespConnection:
        """The connection to one node."""
        if address not in self._open:
            if len(self._open) >= NODES_MAX:
                raise RespError("the store sends us to ever more nodes")
            named = address == (self._endpoint.host, self._endpoint.port)
            way = self._endpoint if named else self._endpoint.at(*address)
            self._open[address] = RespConnection(way, deadline)
        return self._open[address]

    def spread(self, names: Sequence[bytes], ask: Ask, deadline: float) -> Errors:
        """`ask` for every name at its owner, following redirections; what errors remain."""
        refused: dict[int, hiredis.ReplyError] = {}
        rest = [(self._owner(name), place, False) for place, name in enumerate(names)]
        for _ in range(ROUNDS_MAX):
            groups: dict[tuple[Address, bool], list[int]] = defaultdict(list)
            for address, place, asking in rest:
                groups[address, asking].append(place)
            rest = []
            for (address, asking), places in groups.items():
                errors = ask(self.at(address, deadline), places, asking)
                for place, error in errors.items():
                    target = self._redirected(error, names[place], address)
                    if target is None:
                        refused[place] = error
                    else:
                        rest.append((target[0], place, target[1]))
            if not rest:
                return refused
        raise RespError("the store sends us in circles")

    def interrupt(self) -> None:
        """Wakes whoever waits for a node."""
        for node in list(self._open.values()):
            node.interrupt()

    def close(self) -> None:
        """All connections."""
        for node in self._open.values():
            node.close()

    def _owner(self, name: bytes) -> Address:
        return self._owners.get(_slot(name), self._home) if self._clustered else self._home

    def _redirected(
        self, error: hiredis.ReplyError, name: bytes, sender: Address
    ) -> tuple[Address, bool] | None:
        """`MOVED slot host:port` or `ASK slot host:port`; an empty host means the sender's."""
        kind, _, rest = str(error).partition(" ")
        host, _, port = rest.partition(" ")[2].rpartition(":")
        if kind not in ("MOVED", "ASK") or not port.isdecimal():
            return None
        address = (host or sender[0], int(port))
        if kind == "MOVED":
            self._owners[_slot(name)] = address
        return address, kind == "ASK"

    def _learn(self, slots: Any) -> None:
        for first, last, master, *_ in slots:
            host = master[0].decode() if master[0] else self._home[0]
            for slot in range(max(0, first), min(last + 1, SLOTS)):
                self._owners[slot] = (host, master[1])


def _slot(name: bytes) -> int:
    """Our names have no {tag}."""
    return binascii.crc_hqx(name, 0) % SLOTS
