"""Our RESP client beside redis-py with hiredis: the same server, the same values, in turns."""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median

from kvstore.remote.endpoint import Endpoint
from kvstore.remote.resp import RespConnection, Value
from kvstore.remote.server import EmbeddedValkey
from tools.bench.kv.turns import in_turns, timed
from tools.errors import CommandError

VALUE_BYTES = 1024 * 1024
SMALL_BYTES = 24 * 1024
VALUES = 32
ROUNDS = 7
SERVER_BYTES = 512 * 1024 * 1024
DEADLINE_S = 60.0
_KEYS = [b"bench-%d" % number for number in range(VALUES)]
_HEADER = bytes(500)


def measure() -> dict[str, float]:
    """`over_redis_py`: our bandwidth divided by redis-py's pipelines', puts and gets together."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedValkey(Path(folder), SERVER_BYTES)
        server.start()
        try:
            return _compare(server.url)
        finally:
            server.stop()


def _compare(url: str) -> dict[str, float]:
    try:
        import redis
    except ModuleNotFoundError:
        raise CommandError("redis is missing: pip install -e '.[bench]'") from None
    with (
        closing(RespConnection(Endpoint.from_url(url), _soon())) as ours,
        redis.Redis.from_url(url.replace("valkey://", "redis://")) as theirs,
    ):
        data = memoryview(bytes(VALUE_BYTES))
        value = _HEADER + data
        rooms = [memoryview(bytearray(VALUE_BYTES)) for _ in _KEYS]

        def their_put() -> None:
            with theirs.pipeline(transaction=False) as pipeline:
                for key in _KEYS:
                    pipeline.set(key, value)
                pipeline.execute()

        def their_get() -> None:
            with theirs.pipeline(transaction=False) as pipeline:
                for key in _KEYS:
                    pipeline.get(key)
                for room, value in zip(rooms, pipeline.execute(), strict=True):
                    room[:] = memoryview(value)[len(_HEADER) :]

        puts = in_turns(lambda: put_values(ours, data), their_put, ROUNDS)
        gets = in_turns(lambda: get_values(ours, rooms), their_get, ROUNDS)
        small = [room[:SMALL_BYTES] for room in rooms[:1]]
        put_values(ours, data[:SMALL_BYTES])
        small_us = 1e6 * median(timed(lambda: get_values(ours, small)) for _ in range(200))
    moved = VALUES * VALUE_BYTES / 1e9
    ours_s = [put + get for (put, _), (get, _) in zip(puts, gets, strict=True)]
    theirs_s = [put + get for (_, put), (_, get) in zip(puts, gets, strict=True)]
    return {
        "over_redis_py": median(b / a for a, b in zip(ours_s, theirs_s, strict=True)),
        "put_over_redis_py": median(b / a for a, b in puts),
        "get_over_redis_py": median(b / a for a, b in gets),
        "put_gb_s": moved / median(a for a, _ in puts),
        "get_gb_s": moved / median(a for a, _ in gets),
        "small_get_us": small_us,
    }


def put_values(client: RespConnection, data: memoryview, count: int = VALUES) -> None:
    """Under the first `count` keys."""
    commands = [(b"SET", key, (_HEADER, data)) for key in _KEYS[:count]]
    assert client.pipeline(commands, _soon()) == [b"OK"] * count


def get_values(client: RespConnection, rooms: list[memoryview]) -> None:
    """Of the first keys, one for each room."""

    def landed(index: int, what: object) -> None:
        assert isinstance(what, Value), what

    keys = _KEYS[: len(rooms)]
    client.get_into(keys, rooms, lambda head: len(head) == len(_HEADER), _soon(), landed)


def _soon() -> float:
    return time.monotonic() + DEADLINE_S
