"""The peer protocol: golden bytes, strangers, order, credit, and sources that die (K2, S1)."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing

import pytest

from kvstore.connector import Limits
from kvstore.errors import StoreError
from kvstore.peer import frames
from kvstore.peer.client import PeerAddress, PeerSession, peer_tier
from kvstore.peer.frames import Ended, Kind, Pull
from kvstore.peer.server import MAX_CONNECTIONS, PeerServer
from kvstore.stream import Stream, WireBrokenError
from kvstore.tier import Handle, Outcome, Tier
from tests.kvstore.conformance.backend import HOST, free_port
from tests.kvstore.conformance.blocks import LARGE, Block, chain_of, reads_into, verdict
from tests.kvstore.conformance.peer_child import Held, Shelf
from tests.kvstore.peer.meeting import KEYS, SECRET, fill, scripted, session, soon
from tests.waiting import wait_until

GOLDEN_PULL = (
    "040000000700000040000000"  # PULL, request 7, 64 bytes
    "d0070000" + "00000000" + "0000100000000000"  # 2,000 ms, window of 1 MiB
)
GOLDEN_PROOF = "9389d7c1adaf16109b60fe7a8a21770e"


def test_golden_frames() -> None:
    pull = Pull(2_000, 1 << 20, KEYS)
    keys = b"".join(KEYS).hex()
    assert frames.encode_pull(7, pull).hex() == GOLDEN_PULL + keys
    assert frames.decode_pull(bytes.fromhex(GOLDEN_PULL[24:] + keys)) == pull
    assert frames.encode(Kind.END, 7, bytes([Ended.MISSING])).hex() == "06000000070000000100000001"
    assert frames.encode_block(7, 2, b"head", 5).hex() == (
        "050000000700000015000000" + "020000000400000005000000" + b"head".hex()
    )
    assert frames.proof(SECRET, b"server", bytes(16), bytes(range(16))).hex() == GOLDEN_PROOF


def test_who_reaches_a_peer_knows_what_routers_call_its_store(shelf: Shelf) -> None:
    server = PeerServer(shelf, SECRET, name="there:/run/kvd.sock")
    server.start()
    tier = peer_tier(PeerAddress(HOST, server.port), SECRET)
    try:
        assert tier.store == ""
        assert tier.exists_prefix(KEYS, soon()) == 0
        assert tier.store == "there:/run/kvd.sock"
    finally:
        tier.close()
        server.close()


def test_a_peer_is_met_before_anybody_asks_it_and_found_when_it_comes_late(shelf: Shelf) -> None:
    port = free_port()
    tier = peer_tier(PeerAddress(HOST, port), SECRET)
    server = PeerServer(shelf, SECRET, port=port, name="there:/run/kvd.sock")
    try:
        tier.meet()
        tier.drain(10.0)
        assert tier.store == ""
        server.start()

        def met() -> bool:
            tier.meet()
            return tier.store == "there:/run/kvd.sock"

        wait_until(met)
    finally:
        tier.close()
        server.close()


@pytest.mark.parametrize(
    ("hello", "taken"),
    [
        ("010000000000000018000000" + "777270656572310000" + "11" * 15, True),
        ("010000000000000018000000" + "777270656572320000" + "11" * 15, True),
        ("010000000000000018000000" + "777270656572330000" + "11" * 15, False),
    ],
)
def test_the_version_before_is_still_served(
    server: PeerServer[Held], shelf: Shelf, hello: str, taken: bool
) -> None:
    """Recorded greetings; behind the first one's, the questions that were there then."""
    with socket.create_connection((HOST, server.port)) as connected:
        stream = Stream(connected)
        said = bytes.fromhex(hello)
        stream.send([said], soon())
        if not taken:
            with pytest.raises(OSError):
                frames.read_head(stream, soon())
            return
        reply = frames.read_body(stream, frames.read_head(stream, soon()), Kind.HELLO_REPLY, soon())
        own = frames.proof(SECRET, b"client", said[20:36], reply[:16])
        asked = frames.encode(Kind.ASK, 1, KEYS[0])
        stream.send([frames.encode(Kind.PROOF, 0, own), asked], soon())
        count = frames.read_body(stream, frames.read_head(stream, soon()), Kind.COUNT, soon())
        assert count == bytes(8)


def test_a_stranger_gets_nothing(server: PeerServer[Held]) -> None:
    with pytest.raises(OSError):
        session(server, bytes(32))
    with pytest.raises(StoreError):
        PeerServer(Shelf(), b"short")


def test_a_server_that_is_none_of_ours_is_refused() -> None:
    """It may repeat what we say: our own words prove nothing."""
    with socket.create_server((HOST, 0)) as listener:

        def mirror() -> None:
            peer, _ = listener.accept()
            with peer:
                hello = peer.recv(1024)
                peer.sendall(frames.encode(Kind.HELLO_REPLY, 0, hello[20:36] + bytes(16)))
                peer.recv(1024)

        thread = threading.Thread(target=mirror)
        thread.start()
        with pytest.raises(WireBrokenError, match="secret"):
            PeerSession(PeerAddress(HOST, listener.getsockname()[1]), SECRET, soon())
        thread.join()


def test_a_recorded_proof_is_of_no_use_again() -> None:
    one = frames.proof(SECRET, b"client", b"c" * 16, b"s" * 16)
    assert one != frames.proof(SECRET, b"client", b"c" * 16, b"t" * 16)
    assert one != frames.proof(SECRET, b"server", b"c" * 16, b"s" * 16)


def test_credit_bounds_what_a_slow_reader_holds(server: PeerServer[Held], shelf: Shelf) -> None:
    """Without credit the server stops behind the window, and leases nothing while it waits."""
    chain = chain_of(6, 1, kv=LARGE)
    fill(shelf, chain)
    size = len(chain[0].payload)
    with closing(session(server)) as client:
        stream = client._stream
        stream.send(
            [frames.encode_pull(1, Pull(5_000, size + 1, [block.key for block in chain]))], soon()
        )
        for index in (0, 1):
            head = frames.read_head(stream, soon())
            assert head.kind is Kind.BLOCK, index
            stream.skip(head.body_bytes, soon())
        with pytest.raises(TimeoutError):
            frames.read_head(stream, soon(0.1))
        assert shelf.leased == 0
        stream.send([frames.encode(Kind.CREDIT, 1, frames.NUMBER.pack(size))], soon())
        head = frames.read_head(stream, soon())
        assert head.kind is Kind.BLOCK
        stream.skip(head.body_bytes, soon())
        stream.send([frames.encode(Kind.CANCEL, 1)], soon())
        end = frames.read_head(stream, soon())
        assert frames.read_body(stream, end, Kind.END, soon()) == bytes([Ended.CANCELLED])
        # One terminal event, and the connection serves the next request.
        assert client.exists_prefix([block.key for block in chain], soon()) == 6


def test_K2_a_reader_that_stops_reading_holds_nothing_after_its_deadline(
    server: PeerServer[Held], shelf: Shelf
) -> None:
    chain = chain_of(24, 2, kv=LARGE)
    fill(shelf, chain)
    with closing(session(server)) as client:
        keys = [block.key for block in chain]
        client._stream.send([frames.encode_pull(1, Pull(300, 1 << 30, keys))], soon())
        wait_until(lambda: shelf.leased > 0)
        wait_until(lambda: shelf.leased == 0)
    wait_until(lambda: server.connections == 0)


def block_frame(request: int, index: int, block: Block) -> list[bytes]:
    head = frames.encode_block(request, index, block.header, len(block.payload))
    return [head, block.payload]


BAD_STREAMS: dict[str, Callable[[list[Block]], list[bytes]]] = {
    "second block first": lambda chain: block_frame(1, 1, chain[1]),
    "first block twice": lambda chain: block_frame(1, 0, chain[0]) + block_frame(1, 0, chain[0]),
    "of another request": lambda chain: block_frame(2, 0, chain[0]),
    "one too many": lambda chain: (
        block_frame(1, 0, chain[0]) + block_frame(1, 1, chain[1]) + block_frame(1, 2, chain[0])
    ),
    "done too early": lambda chain: [frames.encode(Kind.END, 1, bytes([Ended.DONE]))],
    "an end that is none": lambda chain: [frames.encode(Kind.END, 1, b"\x09")],
    "truncated": lambda chain: [b"".join(block_frame(1, 0, chain[0]))[:-1]],
    "a frame of no kind": lambda chain: [struct.pack("<BBHII", 99, 0, 0, 1, 0)],
    "huge": lambda chain: [struct.pack("<BBHII", Kind.BLOCK, 0, 0, 1, 0xFFFF_FFFF)],
    "sizes that do not add up": lambda chain: [
        frames.FRAME.pack(Kind.BLOCK, 0, 0, 1, 100) + frames.BLOCK_HEAD.pack(0, 50, 10)
    ],
}


@pytest.mark.parametrize("name", sorted(BAD_STREAMS))
def test_streams_out_of_order_break_the_connection(name: str) -> None:
    chain = chain_of(2, 3)
    port, thread = scripted(lambda stream: stream.send(BAD_STREAMS[name](chain), soon()))
    rooms = [block.room() for block in chain]
    settled: dict[int, Outcome] = {}
    client = PeerSession(PeerAddress(HOST, port), SECRET, soon())
    with closing(client), pytest.raises(OSError):
        client.read(reads_into(chain, rooms), soon(), settled.__setitem__)
    thread.join()
    for place, outcome in settled.items():
        assert verdict(chain[place], outcome, rooms[place]) == "good"


def test_too_many_connections_are_turned_away(server: PeerServer[Held], shelf: Shelf) -> None:
    fill(shelf, chain_of(1, 4))
    held = [session(server) for _ in range(MAX_CONNECTIONS)]
    assert server.connections == MAX_CONNECTIONS
    with pytest.raises(OSError):
        session(server)
    for each in held:
        each.close()
    wait_until(lambda: server.connections == 0)
    session(server).close()


def kill_the_source(times: int) -> None:
    """kill -9 in the middle of a run, again and again: no wrong block, nothing waits for ever."""
    chain, port = chain_of(12, 5, kv=LARGE), free_port()
    words = [sys.executable, "-m", "tests.kvstore.peer.nursery", str(port), SECRET.hex()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    tier = peer_tier(PeerAddress(HOST, port), SECRET, Limits(readers=1))
    with closing(tier), subprocess.Popen(words, text=True, **pipes) as nursery:
        lost = 0
        for _ in range(times):
            source = born(nursery)
            rooms = [block.room() for block in chain]
            second = threading.Event()
            handle = pulled(tier, chain, rooms, second)
            assert second.wait(10)
            os.kill(source, signal.SIGKILL)
            outcomes = handle.result(10)
            seen = [verdict(*each) for each in zip(chain, outcomes, rooms, strict=True)]
            assert seen[:2] == ["good"] * 2
            assert set(seen) <= {"good", "lost", "away"}
            lost += seen[-1] != "good"
        born(nursery)
        wait_until(lambda: tier.exists_prefix([block.key for block in chain], soon()) == 12)
        assert lost > times // 2, "hardly any of them was in the middle"
        nursery.kill()


def born(nursery: subprocess.Popen[str]) -> int:
    """A new source at the old place: its pid."""
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    nursery.stdin.write("\n")
    nursery.stdin.flush()
    return int(nursery.stdout.readline())


def pulled(
    tier: Tier, chain: list[Block], rooms: list[bytearray], second: threading.Event
) -> Handle:
    """Once it is worth it to ask: the tier may have found nobody there a moment ago."""
    wait_until(lambda: tier.exists_prefix([chain[0].key], soon()) == 1)
    return tier.get(
        reads_into(chain, rooms), soon(5), lambda place: second.set() if place else None
    )


def test_K2_the_source_dies_in_the_middle() -> None:
    kill_the_source(3)


@pytest.mark.slow
def test_K2_the_source_dies_fifty_times() -> None:
    kill_the_source(50)
