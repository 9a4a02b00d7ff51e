"""The LMCache connector around its sidecar, over a stand-in for LMCache; the real server stands the
conformance suite where an environment with it is given."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvstore.errors import StoreError
from kvstore.remote.build import build_tier
from kvstore.remote.lmcache.program import Program
from kvstore.remote.lmcache.sidecar import HEAD, OP_ASK, SLOT_BYTES, chunks_of, tokens_of
from kvstore.remote.lmcache.tier import LMCacheAddress, LMCacheTier, lmcache_tier
from kvstore.tier import MISS, PRESENT, STORED, WRONG_SIZE, Outcome, Write
from tests.fakes.lmcache_python import make_python
from tests.kvstore.conformance.blocks import LARGE, Block, chain_of, reads_into, verdict

SECRET = bytes(32)


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def until(true: Callable[[], bool]) -> None:
    end = soon(30)
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lmcache")


@pytest.fixture(scope="module")
def tier(folder: Path) -> Iterator[LMCacheTier]:
    address = LMCacheAddress("tcp://127.0.0.1:1", make_python(folder))
    with closing(lmcache_tier(address)) as opened:
        yield opened


def put(tier: LMCacheTier, blocks: list[Block]) -> list[Outcome]:
    """Once the sidecar has started."""
    outcomes: list[Outcome] = []

    def stored() -> bool:
        handle = tier.put([block.write() for block in blocks], soon())
        outcomes[:] = handle.result(20)
        return outcomes[0].reason != "away"

    until(stored)
    return outcomes


def get(tier: LMCacheTier, blocks: list[Block]) -> list[str]:
    rooms = [block.room() for block in blocks]
    outcomes = tier.get(reads_into(blocks, rooms), soon()).result(20)
    return [verdict(*each) for each in zip(blocks, outcomes, rooms, strict=True)]


def test_blocks_of_all_sizes_come_back(tier: LMCacheTier) -> None:
    chain = [*chain_of(3, 1), *chain_of(2, 2, kv=LARGE)]
    keys = [block.key for block in chain]
    assert put(tier, chain) == [STORED] * 5
    assert get(tier, chain) == ["good"] * 5
    assert put(tier, chain[:2]) == [PRESENT] * 2
    assert tier.exists_prefix([*keys, b"k" * 16], soon()) == 5
    assert tier.exists_prefix([b"k" * 16, *keys], soon()) == 0
    missing = chain_of(1, 3)
    assert get(tier, [chain[0], *missing, chain[4]]) == ["good", "miss", "good"]
    wrong = tier.get(reads_into(chain[:2], [bytearray(7), chain[1].room()]), soon()).result(20)
    assert wrong[0].reason == "size"
    assert wrong[1].header == chain[1].header


def test_a_block_whose_tail_was_evicted_is_missing(tier: LMCacheTier, folder: Path) -> None:
    (folder / "torn").touch()
    [block] = chain_of(1, 4, kv=LARGE)
    assert put(tier, [block]) == [STORED]
    (folder / "torn").unlink()
    assert tier.exists_prefix([block.key], soon()) == 1
    outcomes = tier.get(reads_into([block], [block.room()]), soon()).result(20)
    assert list(outcomes) == [MISS]


def test_a_value_that_is_no_block_is_no_hit_though_it_fills_the_room(tier: LMCacheTier) -> None:
    good, stray = chain_of(2, 7)
    size = len(stray.payload)
    bare = Write(stray.key, b"", memoryview(bytes(size)))
    assert list(tier.put([good.write(), bare], soon()).result(20)) == [STORED] * 2
    for _ in range(4):
        outcomes = tier.get(reads_into([stray], [bytearray(size)]), soon()).result(20)
        assert list(outcomes) == [WRONG_SIZE]
        assert get(tier, [good]) == ["good"]


def test_a_sidecar_that_was_killed_is_started_again(tier: LMCacheTier) -> None:
    chain = chain_of(2, 5)
    put(tier, chain)
    first = tier.program.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert put(tier, chain) == [STORED] * 2
    assert tier.program.pid != first
    assert get(tier, chain) == ["good"] * 2


def test_a_server_that_is_away_is_left_alone_and_found_again(
    tier: LMCacheTier, folder: Path
) -> None:
    chain = chain_of(1, 6)
    put(tier, chain)
    (folder / "gone").touch()
    assert get(tier, chain)[0] in ("away", "lost")
    assert tier.exists_prefix([chain[0].key], soon()) == 0
    (folder / "gone").unlink()
    until(lambda: get(tier, chain) == ["good"])


def test_it_ends_with_its_tier(tmp_path: Path) -> None:
    tier = lmcache_tier(LMCacheAddress("tcp://127.0.0.1:1", make_python(tmp_path)))
    pid = tier.program.pid
    assert pid is not None
    tier.close()
    tier.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_S1_ten_thousand_odd_bytes_to_the_sidecar(tmp_path: Path) -> None:
    """Its only way in is a socket that we made; even so nothing on it ends the process."""
    program, dice = Program(make_python(tmp_path), "tcp://127.0.0.1:1", 0), random.Random(3)
    with closing(program):
        program.start()
        pid = program.pid
        for _ in range(60):
            with closing(program.session(soon(30))) as session, suppress(OSError):
                session.settimeout(10)
                session.sendall(dice.randbytes(dice.randrange(1, 400)))
                session.shutdown(1)
                while session.recv(4_096):
                    pass
        with closing(program.session(soon())) as session:
            session.settimeout(10)
            session.sendall(HEAD.pack(OP_ASK, 1) + b"k" * 16)
            assert session.recv(HEAD.size) == HEAD.pack(0, 0)
        assert program.pid == pid


def test_no_two_keys_share_a_chunk() -> None:
    keys = [bytes(15) + b"\x01", bytes([1]) + bytes(15), b"\xff" * 16]
    chunks = [tokens_of(key, 2, 32) for key in keys]
    assert len({tokens[:32] for tokens in chunks}) == len(set(chunks)) == 3
    assert all(0 <= token < 1 << 16 for tokens in chunks for token in tokens)
    assert [chunks_of(size) for size in (0, SLOT_BYTES - 8, SLOT_BYTES - 7)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("lmcache://10.0.0.1:5555", "this host only"),
        ("lmcache://cache.example", "this host only"),
        ("lmcache://secret@127.0.0.1", "URL is"),
        ("lmcache://", "URL is"),
        ("lmcache://127.0.0.1?http=x", "port"),
    ],
)
def test_a_server_elsewhere_is_refused(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build_tier(url, secret=SECRET)


def test_what_a_url_says() -> None:
    address = LMCacheAddress.from_url("lmcache://localhost?python=/opt/l/bin/python&http=8080")
    assert address == LMCacheAddress("tcp://localhost:5555", Path("/opt/l/bin/python"), 8080)
    assert LMCacheAddress.from_url("lmcache://[::1]:9").server == "tcp://[::1]:9"


def test_a_python_that_can_not_do_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no Python at"):
        build_tier(f"lmcache://127.0.0.1?python={tmp_path / 'none'}", secret=SECRET)
    (tmp_path / "bare").touch()
    with (
        closing(Program(make_python(tmp_path), "tcp://127.0.0.1:1", 0)) as program,
        pytest.raises(OSError, match="does its Python have lmcache"),
    ):
        program.session(soon(20))
