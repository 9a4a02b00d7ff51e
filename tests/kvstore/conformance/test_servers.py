"""Tiers whose server stalls, dies, comes back, or is cut off in the middle."""

from __future__ import annotations

import threading
import time

from kvstore.tier import CLOSED, Health, Tier
from tests.kvstore.conformance.asking import Seed, exists, get, on, soon
from tests.kvstore.conformance.backend import Backend
from tests.kvstore.conformance.blocks import (
    LARGE,
    Block,
    chain_of,
    reads_into,
)
from tests.kvstore.conformance.proxy import CuttingProxy
from tests.waiting import wait_until


@on("server")
def test_a_stalled_server_costs_the_deadline_and_no_more(
    backend: Backend, tier: Tier, seed: Seed
) -> None:
    chain = chain_of(2, seed())
    backend.store(chain)
    assert get(tier, chain)[0] == ["good"] * 2
    backend.stall()
    try:
        began = time.monotonic()
        assert set(get(tier, chain, seconds=0.3)[0]) <= {"deadline", "unreachable"}
        assert tier.exists_prefix([chain[0].key], soon(0.2)) == 0
        assert time.monotonic() - began < 20.0
    finally:
        backend.resume()
    wait_until(lambda: get(tier, chain)[0] == ["good"] * 2)


@on("server")
def test_K1_after_cancel_nobody_writes_to_the_room(
    backend: Backend, tier: Tier, seed: Seed
) -> None:
    chain = chain_of(4, seed(), kv=LARGE)
    backend.store(chain)
    assert get(tier, chain)[0] == ["good"] * 4
    backend.stall()
    try:
        rooms = [block.room() for block in chain]
        handle = tier.get(reads_into(chain, rooms), soon())
        canceller = threading.Thread(target=handle.cancel)
        canceller.start()
        canceller.join(5)
        assert not canceller.is_alive(), "cancel must not wait for the server"
        for room in rooms:
            room[:] = b"\x55" * len(room)
    finally:
        backend.resume()
    assert {outcome.reason for outcome in handle.result(0)} == {"cancelled"}
    wait_until(lambda: get(tier, chain)[0] == ["good"] * 4)
    assert all(set(room) == {0x55} for room in rooms)


def cuts(block: Block) -> list[int]:
    """So many bytes towards the client, then the connection is gone."""
    head, size = len(block.header), len(block.value)
    return [1, 40, 600, head + 300, size // 2, size + head, 2 * size, 3 * size - 1]


@on("tcp")
def test_a_connection_cut_in_the_middle_goes_on_where_it_broke(
    backend: Backend, seed: Seed
) -> None:
    chain = chain_of(3, seed(), kv=LARGE)
    backend.store(chain)
    for cut in cuts(chain[0]):
        with CuttingProxy(backend.port, cut) as proxy:
            tier = backend.at(proxy.port)
            assert get(tier, chain)[0] == ["good"] * 3, cut
            # S3 takes a connection for each block: further bytes than one block never pass.
            assert proxy.cuts == 1 or cut > len(chain[0].value)
            tier.close()


@on("tcp")
def test_one_that_is_always_cut_gives_no_wrong_block(backend: Backend, seed: Seed) -> None:
    chain = chain_of(3, seed(), kv=LARGE)
    backend.store(chain)
    with CuttingProxy(backend.port, len(chain[0].value) + 900, always=True) as proxy:
        tier = backend.at(proxy.port)
        seen = get(tier, chain)[0]
        assert seen[-1] in ("lost", "away", "good")
        assert set(seen) <= {"good", "lost", "away"}
        tier.close()


@on("server")
def test_a_restarted_server_is_used_again(backend: Backend, tier: Tier, seed: Seed) -> None:
    chain = chain_of(3, seed())
    backend.store(chain)
    assert get(tier, chain)[0] == ["good"] * 3
    backend.restart()
    backend.store(chain)
    wait_until(lambda: get(tier, chain)[0] == ["good"] * 3)
    assert tier.health() is Health.OK


@on("server")
def test_close_while_busy_ends_everything(backend: Backend, seed: Seed) -> None:
    chain = chain_of(2, seed())
    backend.store(chain)
    tier = backend.open()
    assert get(tier, chain)[0] == ["good"] * 2
    backend.stall()
    try:
        handles = [
            tier.get(reads_into(chain, [block.room() for block in chain]), soon()) for _ in range(6)
        ]
        began = time.monotonic()
        tier.close()
        assert time.monotonic() - began < 20.0
    finally:
        backend.resume()
    for handle in handles:
        assert {outcome.reason for outcome in handle.result(0)} == {"closed"}
    assert get(tier, chain)[0] == ["closed"] * 2
    assert tier.put([chain[0].write()], soon()).result(1) == [CLOSED]
    assert exists(tier, chain) == 0
    tier.close()


@on("tcp")
def test_a_store_that_is_away_is_left_alone(backend: Backend, seed: Seed) -> None:
    chain = chain_of(1, seed())
    with CuttingProxy(backend.port, 0, always=True) as proxy:
        port = proxy.port
    tier = backend.at(port)  # nobody listens there any more
    assert get(tier, chain)[0] == ["away"]
    wait_until(lambda: get(tier, chain)[0] == ["away"] and tier.health() is Health.OPEN)
    began = time.monotonic()
    for _ in range(200):
        get(tier, chain)
        assert exists(tier, chain) == 0
    assert time.monotonic() - began < 20.0, "nobody waits for what is away"
    tier.close()
