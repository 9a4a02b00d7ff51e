"""What only files can get wrong: bounds, crashes in the middle, leftovers, a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.remote.file import PARTIAL_S, FileStore, file_tier
from kvstore.tier import Status, Tier
from tests.kvstore.conformance.blocks import LARGE, Block, chain_of, reads_into, verdict

SIZE = len(chain_of(1, 1)[0].value)


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def put(tier: Tier, blocks: list[Block], ttl_s: float | None = None) -> list[Status]:
    outcomes = tier.put([block.write(ttl_s) for block in blocks], soon()).result(10)
    return [outcome.status for outcome in outcomes]


def seen(tier: Tier, blocks: list[Block]) -> list[str]:
    rooms = [block.room() for block in blocks]
    outcomes = tier.get(reads_into(blocks, rooms), soon()).result(10)
    return [verdict(*each) for each in zip(blocks, outcomes, rooms, strict=True)]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("??/*")}


def test_the_folder_stays_within_its_bound_and_keeps_what_was_used_last(tmp_path: Path) -> None:
    chain = chain_of(12, 1)
    with closing(file_tier(tmp_path, 6 * SIZE)) as tier:
        put(tier, chain[:6])
        assert seen(tier, chain[:1]) == ["good"]
        put(tier, chain[6:9])
        assert seen(tier, chain[:4]) == ["good", "miss", "miss", "miss"]
        stats = tier.stats()
        assert (stats.blocks, stats.used_bytes) == (6, 6 * SIZE)
        assert len(files(tmp_path)) == 6
    with closing(file_tier(tmp_path, 3 * SIZE)) as smaller:
        assert smaller.stats().blocks == 3
        assert len(files(tmp_path)) == 3


def test_blocks_outlive_the_process(tmp_path: Path) -> None:
    chain = chain_of(3, 2)
    for expected in (["miss"] * 3, ["good"] * 3):
        with closing(file_tier(tmp_path, 1 << 20)) as tier:
            assert seen(tier, chain) == expected
            put(tier, chain)


def test_a_start_sweeps_what_is_over_torn_or_unfinished(tmp_path: Path) -> None:
    good, old, torn, foreign = chain_of(4, 3)
    with closing(file_tier(tmp_path, 1 << 20)) as tier:
        put(tier, [good, old, torn, foreign])
    store = FileStore(tmp_path, 1 << 20, 60.0, time.time)
    os.truncate(store.path(torn.key), SIZE - 1)
    os.utime(store.path(old.key), (time.time(), time.time() - 0.001))
    lasting = time.time() + 1_000
    os.utime(store.path(torn.key), (lasting, lasting))
    store.path(foreign.key).write_bytes(b"not a block at all")
    os.utime(store.path(foreign.key), (lasting, lasting))
    left, fresh = store.aside(good.key), store.aside(good.key)
    for path in (left, fresh):
        path.write_bytes(good.value[:100])
    long_ago = time.time() - PARTIAL_S - 1
    os.utime(left, (long_ago, long_ago))
    with closing(file_tier(tmp_path, 1 << 20)) as tier:
        assert files(tmp_path) == {store.path(good.key).name, fresh.name}
        assert seen(tier, [good, old, torn, foreign]) == ["good", "miss", "miss", "miss"]


def test_a_chain_renews_its_time_as_a_whole(tmp_path: Path) -> None:
    now = [1_000.0]
    chain = chain_of(5, 4)
    with closing(file_tier(tmp_path, 1 << 20, ttl_s=100.0, clock=lambda: now[0])) as tier:
        put(tier, chain)
        now[0] += 60
        assert tier.exists_prefix([block.key for block in chain], soon()) == 5
        now[0] += 60
        # Only the tail is read; the head lives on with it.
        assert seen(tier, chain[3:]) == ["good"] * 2
        assert tier.exists_prefix([block.key for block in chain], soon()) == 5
        now[0] += 101
        assert tier.exists_prefix([block.key for block in chain], soon()) == 0


WRITER = """
import resource, signal, sys, time
from pathlib import Path
from kvstore.remote.file import file_tier
from tests.kvstore.conformance.blocks import LARGE, chain_of
if sys.argv[2] != "0":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
tier = file_tier(Path(sys.argv[1]), 1 << 30)
print("ready", flush=True)
for seed in range(100):
    blocks = chain_of(1, seed, kv=LARGE)
    outcomes = tier.put([b.write() for b in blocks], time.monotonic() + 10).result(10)
    print(outcomes[0].reason or outcomes[0].status.value, flush=True)
"""


def writer(folder: Path, largest_file: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(largest_file)],
        stdout=subprocess.PIPE,
        text=True,
    )


def with_writer(folder: Path, largest_file: int, check: Callable[[list[str]], None]) -> None:
    with writer(folder, largest_file) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline().strip() for _ in range(4)]
        child.kill()
        check(lines)


def test_a_writer_that_is_killed_leaves_nothing_half_written(tmp_path: Path) -> None:
    with_writer(tmp_path, 0, lambda lines: None)
    blocks = [chain_of(1, seed, kv=LARGE)[0] for seed in range(6)]
    with closing(file_tier(tmp_path, 1 << 30)) as tier:
        assert set(seen(tier, blocks[:3])) == {"good"}
        assert set(seen(tier, blocks)) <= {"good", "miss"}


def test_a_full_disk_is_a_failure_by_name_and_leaves_nothing(tmp_path: Path) -> None:
    """The kernel refuses to write on, as it does where the disk is full."""

    def check(lines: list[str]) -> None:
        assert lines == ["ready", "full", "full", "full"]

    with_writer(tmp_path, 100_000, check)
    assert all(name.endswith(".part") for name in files(tmp_path))
    assert len(files(tmp_path)) <= 1


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="no folder for KV blocks"):
        file_tier(tmp_path / "file" / "folder", 1 << 20)
