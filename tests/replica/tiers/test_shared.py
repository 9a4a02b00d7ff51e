"""Replicas that share a store: what one wrote is a hit for the other, and a dead store a miss."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from configs.load import ConfigError
from configs.schema import KvConfig
from events.load import PrefillFit
from kvstore.layout import Layout
from kvstore.remote.build import build_tier
from kvstore.remote.server import EmbeddedValkey
from kvstore.tier import Tier
from replica.tiers.build import host_tier, named_tier, remote_tier
from tests.fakes.mover import fake_layout
from tests.kvstore.kvd.daemon import Daemon
from tests.replica.sched.rig import KEY, sampling, tokens_of
from tests.replica.tiers.rig import BLOCK_TOKENS, TieredRig, tiered
from tests.waiting import wait_until

PROMPT = tokens_of(1, 26)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("kvd") / "kvd.sock") as daemon:
        yield daemon


def of_host(daemon: Daemon) -> KvConfig:
    return KvConfig(host=str(daemon.path), check_one_in=0, staging_bytes=16 << 10)


def test_a_block_that_one_replica_wrote_is_a_hit_for_the_other(daemon: Daemon) -> None:
    kv = of_host(daemon)
    near = [host_tier(kv), host_tier(kv)]
    with tiered(near[0], kv=kv) as (one, _, _), tiered(near[1], kv=kv) as (two, runner, _):
        one.run(PROMPT)
        one.settle()
        child = two.submit(PROMPT)
        two.assert_right(runner, child)
        assert two.sink.end_of(child).cached_tokens == 24
        assert one.tiers.names == two.tiers.names != ("",)
        other = two.submit(PROMPT, salt=b"other")
        two.assert_right(runner, other)
        assert two.sink.end_of(other).cached_tokens == 0


def test_a_cleared_cache_leaves_what_the_others_of_the_host_wrote(daemon: Daemon) -> None:
    kv = of_host(daemon)
    mine, theirs = tokens_of(2, 26), tokens_of(3, 26)
    near = [host_tier(kv), host_tier(kv)]
    with tiered(near[0], kv=kv) as (one, _, _), tiered(near[1], kv=kv) as (two, runner, _):
        for rig, prompt in ((one, mine), (two, theirs)):
            rig.run(prompt)
            rig.settle()
        one.engine.clear_cache()
        two.engine.clear_cache(below=False)
        found = {}
        for name, prompt in (("mine", mine), ("theirs", theirs)):
            child = two.submit(prompt)
            two.assert_right(runner, child)
            found[name] = two.sink.end_of(child).cached_tokens
        assert found == {"mine": 0, "theirs": 24}


def test_K2_the_host_s_store_dies_and_nobody_notices_but_the_counters(tmp_path: Path) -> None:
    with Daemon(tmp_path / "kvd.sock") as daemon:
        kv = of_host(daemon)
        with tiered(host_tier(kv), kv=kv) as (rig, runner, _):
            rig.run(PROMPT)
            rig.forget()
            daemon.stop(signal.SIGKILL)
            for seed in range(3):
                rig.assert_right(runner, rig.submit(PROMPT, sampling(5 + seed)))
                rig.engine.clear_cache(below=False)
            rig.assert_nothing_left()


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_K6_valkey_is_killed_and_started_again_under_load(tmp_path: Path, times: int) -> None:
    """Requests all the while: every answer right, the faults counted, and in the end hits again."""
    server = EmbeddedValkey(tmp_path, 64 << 20)
    server.start()
    kv = KvConfig(check_one_in=0, staging_bytes=16 << 10, load_deadline_ms=500.0)
    known = [tokens_of(10 + number, 26) for number in range(3)]
    try:
        with tiered(None, build_tier(server.url, secret=KEY), kv=kv) as (rig, runner, _):
            counts = rig.tiers.cascade.levels[-1].counts

            def load(prompts: Sequence[list[int]]) -> None:
                """Twice: the second use is what is written."""
                for _ in range(2):
                    children = [rig.submit(prompt) for prompt in prompts]
                    for child in children:
                        rig.assert_right(runner, child)
                    rig.forget()

            for number in range(times):
                load(known)
                assert server.pid is not None
                os.kill(server.pid, signal.SIGKILL)
                load([*known, tokens_of(20 + number, 26)])
                server.stop()
                server.start()
            skipped = rig.tiers.outbound.skipped
            assert counts.failed.total() + skipped.total() >= times, (counts, skipped)
            wait_until(lambda: _restored(rig, known[0]))
            rig.settle()
            rig.assert_nothing_left()
    finally:
        server.stop()


def _restored(rig: TieredRig, prompt: list[int]) -> bool:
    rig.run(prompt)
    rig.forget()
    return rig.sink.end_of(rig.run(prompt)).cached_tokens == 24


@pytest.mark.parametrize("seal", [False, True], ids=["plain", "sealed"])
def test_a_folder_serves_as_the_store_of_all_hosts(tmp_path: Path, seal: bool) -> None:
    url = f"file://{tmp_path / 'blocks'}?max_bytes=10000000"
    kv = KvConfig(host="off", remote=url, remote_seal=seal, check_one_in=0, staging_bytes=16 << 10)

    def far() -> Tier | None:
        return remote_tier(kv, KEY, Layout.of(fake_layout(BLOCK_TOKENS)))

    with tiered(None, far(), kv=kv) as (one, _, _), tiered(None, far(), kv=kv) as (two, runner, _):
        for rig in (one, two):
            # Its speed is guessed at first: here computing is slower than any guess.
            rig.tiers.loader.prefill = lambda: PrefillFit(a=0.0, b=50.0, c=0.0, confidence=1.0)
        one.run(PROMPT)
        one.run(PROMPT)
        one.settle()
        child = two.submit(PROMPT)
        two.assert_right(runner, child)
        assert two.sink.end_of(child).cached_tokens == 24
        assert str(tmp_path) not in str(one.tiers.names)
        prompt = np.array(PROMPT[:4], "<u4").tobytes()
        stored = [path.read_bytes() for path in (tmp_path / "blocks").rglob("*") if path.is_file()]
        assert any(prompt in data for data in stored) is not seal


@pytest.mark.parametrize(
    ("kv", "says"),
    [(KvConfig(host="sometimes"), "kv.host"), (KvConfig(remote="ftp://x"), "begins with one of")],
)
def test_a_setting_that_can_t_be_used_is_said(kv: KvConfig, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        host_tier(kv)
        named_tier(kv.remote, KEY, None)
