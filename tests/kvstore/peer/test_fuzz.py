"""S1: whatever either end of a peer's connection is sent."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable
from contextlib import closing

import pytest

from kvstore.peer import frames
from kvstore.peer.client import PeerAddress, PeerSession
from kvstore.peer.frames import Kind
from kvstore.peer.server import PeerServer
from kvstore.stream import Stream
from kvstore.tier import Outcome, Read
from tests.kvstore.conformance.backend import HOST
from tests.kvstore.conformance.blocks import chain_of, verdict
from tests.kvstore.conformance.peer_child import Held, Shelf
from tests.kvstore.peer.meeting import SECRET, fill, scripted, session, soon


def odd_bytes(dice: random.Random) -> bytes:
    kind = dice.choice([*Kind, 0, 77, 255])
    body = dice.randbytes(dice.randrange(64))
    size = dice.choice([len(body), 0, 16, 32, 0xFFFF_FFFF])
    head = struct.pack("<BBHII", kind, dice.choice([0, 0, 0, 1]), 0, dice.randrange(3), size)
    return dice.choice([head + body, dice.randbytes(40), b"\x80\x04\x95pickle", head])


Connect = Callable[[PeerServer[Held]], PeerSession]


def fuzz(server: PeerServer[Held], shelf: Shelf, count: int, connect: Connect = session) -> None:
    """Most of it before the hello, some behind it; the server lives on and leases nothing."""
    [block] = chain_of(1, 6)
    fill(shelf, [block])
    dice = random.Random(9)
    strangers = 0
    while strangers < count:
        if strangers % 8 == 0:
            client = connect(server)._stream
        else:
            client = Stream(socket.create_connection((HOST, server.port)))
        try:
            for _ in range(4):
                strangers += 1
                client.send([odd_bytes(dice)], soon())
        except OSError:
            pass
        client.close()
    with closing(connect(server)) as client_again:
        settled: dict[int, Outcome] = {}
        room = block.room()
        client_again.read([Read(block.key, memoryview(room))], soon(), settled.__setitem__)
        assert verdict(block, settled[0], room) == "good"
    assert shelf.leased == 0


def test_S1_a_thousand_fuzzed_frames(server: PeerServer[Held], shelf: Shelf) -> None:
    fuzz(server, shelf, 1_000)


@pytest.mark.slow
def test_S1_ten_thousand_fuzzed_frames(server: PeerServer[Held], shelf: Shelf) -> None:
    fuzz(server, shelf, 10_000)


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_S1_whatever_a_server_answers_costs_a_read_and_nothing_else(count: int) -> None:
    """Each request is settled once at most, nothing but the right block passes its check, and the
    connection ends within its deadline."""
    block, dice, said = chain_of(1, 6)[0], random.Random(11), 0
    right = frames.encode_block(1, 0, block.header, len(block.payload)) + block.payload
    while said < count:
        parts = [odd_bytes(dice) for _ in range(dice.randrange(1, 9))]
        said += len(parts)
        if dice.random() < 0.5:
            parts.insert(0, right[: dice.choice([len(right), dice.randrange(len(right))])])
        port, thread = scripted(lambda stream, parts=parts: stream.send(parts, soon()))
        settled: list[tuple[int, Outcome]] = []
        rooms = [block.room(), block.room()]
        reads = [Read(block.key, memoryview(room)) for room in rooms]

        def settle(place: int, outcome: Outcome, to: list[tuple[int, Outcome]] = settled) -> None:
            to.append((place, outcome))

        with (
            closing(PeerSession(PeerAddress(HOST, port), SECRET, soon())) as client,
            pytest.raises(OSError),
        ):
            client.read(reads, soon(), settle)
        thread.join()
        assert [place for place, _ in settled] in ([], [0])
        for _, outcome in settled:
            assert (verdict(block, outcome, rooms[0]) == "good") == (parts[0] == right)
