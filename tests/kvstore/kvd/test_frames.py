"""What is not understood is refused, and harms nobody (S1)."""

from __future__ import annotations

import pickle
import random
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from events.errors import WireError
from kvstore.arena.messages import Finished, Place, Want
from kvstore.kvd.client import open_tier
from kvstore.kvd.messages import (
    LENGTH,
    MAX_FRAME_BYTES,
    VERSION,
    Abort,
    Commit,
    Delete,
    Exists,
    Follow,
    Hello,
    Keys,
    Open,
    Pin,
    Purge,
    Release,
    Request,
    Reserve,
    Stats,
    body_bytes,
    frame,
    reply_of,
    request_of,
)
from kvstore.tier import Status
from tests.kvstore.batches import get, put, writes_of
from tests.kvstore.blocks import run_of
from tests.kvstore.kvd.daemon import SOON_S, Daemon

KEY = bytes(range(16))
PLACE = Place(8_192, 5)
REQUESTS: list[Request] = [
    Reserve([Want(KEY, 4_096, KEY)]),
    Commit([Finished(PLACE, b"header", 1.5)]),
    Abort([PLACE]),
    Open([KEY, KEY]),
    Release([PLACE]),
    Exists([KEY]),
    Delete([KEY]),
    Purge(KEY),
    Purge(None),
    Pin([KEY], 2.0),
    Stats(),
    Keys(b"", 10),
    Follow(),
]
HELLO = frame(Hello(VERSION, "fuzz"))
GOLDEN = Path(__file__).parents[2] / "data" / "kvd_requests_v1.hex"


def test_golden_frames() -> None:
    """The words of version 1 stay what they are."""
    lines = GOLDEN.read_text().split()
    assert [frame(request).hex() for request in REQUESTS] == lines[1:]
    assert HELLO.hex() == lines[0]
    assert [request_of(bytes.fromhex(line)[4:]) for line in lines[1:]] == REQUESTS


@pytest.mark.parametrize(
    "request_",
    [
        ["Open", [b"short"]],
        ["Open", [KEY] * 2_000],
        ["Reserve", [[KEY, -1, KEY]]],
        ["Commit", [[[0, 1], b"x" * 20_000, None]]],
        ["Commit", [[[0, 1], b"x", float("nan")]]],
        ["Pin", [KEY], float("inf")],
        ["Keys", b"", 1 << 40],
        ["Explode"],
        {"a": 1},
        [],
    ],
)
def test_values_have_bounds(request_: object) -> None:
    with pytest.raises(WireError):
        request_of(msgspec.msgpack.encode(request_))


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, (1 << 32) - 1])
def test_lengths_have_bounds(length: int) -> None:
    with pytest.raises(WireError):
        body_bytes(struct.pack("<I", length))


def connected(daemon: Daemon) -> socket.socket:
    user = socket.socket(socket.AF_UNIX)
    user.settimeout(SOON_S)
    user.connect(str(daemon.path))
    return user


def until_eof(user: socket.socket) -> bytes:
    data = b""
    while part := user.recv(65_536):
        data += part
    return data


@pytest.mark.parametrize(
    "said",
    [
        pickle.dumps({"a": [1, 2, 3]}),
        frame(Hello(VERSION + 1, "from the future")),
        frame(Stats()),
        HELLO + pickle.dumps(print),
        HELLO + LENGTH.pack(5) + b"\xff" * 5,
        HELLO + LENGTH.pack(MAX_FRAME_BYTES + 1),
        HELLO + HELLO,
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_S1_whoever_says_something_else_is_hung_up_on_with_a_reason(
    said: bytes, daemon: Daemon
) -> None:
    with connected(daemon) as user:
        user.sendall(said)
        answer = until_eof(user)
        (length,) = LENGTH.unpack_from(answer[-4 - last_body(answer) :])
        refused = reply_of(answer[-length:])
        assert type(refused).__name__ == "Refused"
    daemon.wait_idle(SOON_S)


def last_body(answer: bytes) -> int:
    """How long the last frame's body is."""
    at = 0
    while at + 4 + body_bytes(answer[at : at + 4]) < len(answer):
        at += 4 + body_bytes(answer[at : at + 4])
    return body_bytes(answer[at : at + 4])


def random_body(dice: random.Random) -> bytes:
    return dice.randbytes(dice.randrange(1, 60))


def spoilt_request(dice: random.Random) -> bytes:
    body = bytearray(frame(dice.choice(REQUESTS))[4:])
    for _ in range(dice.randrange(1, 4)):
        body[dice.randrange(len(body))] = dice.randrange(256)
    return bytes(body)


def cut_request(dice: random.Random) -> bytes:
    body = frame(dice.choice(REQUESTS))[4:]
    return body[: dice.randrange(1, len(body) + 1)]


def odd_request(dice: random.Random) -> bytes:
    """Well-formed, about slots that nobody gave away."""
    place = Place(dice.randrange(1 << 40), dice.randrange(1 << 20))
    key = dice.randbytes(16)
    return frame(
        dice.choice(
            [
                Commit([Finished(place, dice.randbytes(50), None)]),
                Abort([place] * 3),
                Release([place] * 3),
                Open([key] * 5),
                Reserve([Want(key, dice.choice([0, 1, 1 << 62]), key)]),
            ]
        )
    )[4:]


FUZZ: list[Callable[[random.Random], bytes]] = [
    random_body,
    spoilt_request,
    cut_request,
    odd_request,
]


def fuzz(daemon: Daemon, frames: int, seed: int) -> None:
    dice, sent = random.Random(seed), 0
    while sent < frames:
        with connected(daemon) as user:
            count = dice.randrange(1, 12)
            bodies = [dice.choice(FUZZ)(dice) for _ in range(count)]
            sent += count
            user.sendall(HELLO + b"".join(LENGTH.pack(len(body)) + body for body in bodies))
            if dice.random() < 0.2:  # the others leave with their answers unread
                user.shutdown(socket.SHUT_WR)
                until_eof(user)


def harmless(daemon: Daemon, frames: int, seed: int) -> None:
    """Another user's blocks are as they were, memory too, and nobody is left behind."""
    tier, blocks = open_tier(daemon.path, "bystander"), run_of(3, seed=80 + seed)
    writes = writes_of(blocks)
    keys = [block.key for block in blocks]
    pid, before = daemon.pid, resident_bytes(daemon.pid)
    began = time.monotonic()
    fuzz(daemon, frames, seed)
    put(tier, writes)
    outcomes, payloads, _ = get(tier, keys)
    assert [outcome.status for outcome in outcomes] == [Status.HIT] * 3
    assert payloads == [bytes(write.payload) for write in writes]
    tier.close()
    daemon.wait_idle(SOON_S)
    assert daemon.pid == pid
    assert resident_bytes(pid) - before < 32 << 20
    assert time.monotonic() - began < 600


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4_096


def test_S1_ten_thousand_fuzzed_frames(daemon: Daemon) -> None:
    harmless(daemon, 10_000, seed=1)
