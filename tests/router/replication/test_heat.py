"""Hot heads are found where prompts part, and nothing of them grows or shows."""

from __future__ import annotations

import random

import numpy as np

from events.decision import RouteDecision
from kvstore.identity import KEY_BYTES, KeyChain
from router.replication import heat
from router.replication.heat import HeadHeat
from tests.router.gateway.kit import job
from tests.router.kit import BLOCK_TOKENS, POOL, Clock, prompt

HEAD = (1, 20)


def asked(chain: KeyChain, **changes: object):
    """A request with this chain; its ids are arbitrary but as long."""
    ids = np.frombuffer(chain.data, "<u4")[: len(chain) * 4].repeat(4).astype("<u4")
    values: dict[str, object] = {"chain": chain, "prompt": ids.tobytes() + b"tail", "pool": POOL}
    return job(**{**values, **changes})


def decided(shared: int, held: int | None = None, **changes: object) -> RouteDecision:
    """The warmest held `shared` blocks; forced off to one that held `held`."""
    values: dict[str, object] = {
        "decision_id": "d",
        "request_id": "r",
        "tenant": "t",
        "policy": "p",
        "replica": "r1",
        "dispatch_seq": 1,
        "attempt": 1,
        "prompt_tokens": 0,
        "predicted_cached_tokens": (shared if held is None else held) * BLOCK_TOKENS,
        "predicted_ttft_ms": 0.0,
        "reason": "",
        "candidates": (),
        "decided_us": 0.0,
        "wall_time_ms": 0,
        "shared_blocks": shared,
        "forced_off": "" if held is None else "r0",
    }
    return RouteDecision(**{**values, **changes})


def test_the_shared_head_is_found_and_not_the_whole_prompts() -> None:
    clock = Clock()
    heats = HeadHeat(clock)
    for tail in range(20):
        heats.note(asked(prompt(HEAD, (100 + tail, 7)), tenant=f"t{tail}"), decided(20))
    (head,) = heats.settle()
    assert head.chain.data == prompt(HEAD).data
    assert (head.blocks, head.tokens) == (20, 320)
    assert len(head.prompt) == 4 * 320
    assert head.tenant == "t19"
    assert head.share == 1.0
    assert head.forced_off_per_s == 0.0


def test_a_hot_branch_is_counted_by_itself_and_not_again_for_its_trunk() -> None:
    heats = HeadHeat(Clock())
    for tail in range(12):
        heats.note(asked(prompt(HEAD, (50, 10), (100 + tail, 3))), decided(20 if tail < 2 else 30))
        heats.note(asked(prompt((7, 9), (200 + tail, 3))), decided(9))
    heats.settle()
    assert [head.blocks for head in heats.heads] == [30, 9]
    for tail in range(8):
        heats.note(asked(prompt(HEAD, (300 + tail, 3))), decided(20))
    assert sorted(head.blocks for head in heats.settle()) == [9, 20, 30]


def test_only_what_the_chosen_one_lacked_was_forced_off() -> None:
    heats = HeadHeat(Clock())
    for tail in range(8):
        heats.note(asked(prompt(HEAD, (100 + tail, 3))), decided(20))
        heats.note(asked(prompt(HEAD, (50, 10), (100 + tail, 3))), decided(30, held=20))
    forced = {head.blocks: head.forced_off_per_s for head in heats.settle()}
    assert forced[20] == 0.0
    assert forced[30] > 0.0
    heats.relieve(next(head for head in heats.heads if head.blocks == 30))
    assert all(head.forced_off_per_s == 0.0 for head in heats.settle())


def test_heat_fades_with_time_and_ids_leave_with_it() -> None:
    clock = Clock()
    heats = HeadHeat(clock)
    for tail in range(2 * heat.MIN_REQUESTS):
        heats.note(asked(prompt(HEAD, (100 + tail, 3))), decided(20))
    before = heats.settle()[0].requests_per_s
    number = heats.heads[0].number
    clock.pass_s(heat.HALF_LIFE_S * 0.9)
    (head,) = heats.settle()
    assert head.number == number
    assert 0.5 < head.requests_per_s / before < 0.6
    assert heats.head_bytes == len(head.prompt)
    clock.pass_s(heat.HALF_LIFE_S * 0.2)
    assert heats.settle() == []
    assert heats.head_bytes == 0


def test_counts_survive_their_rescaling() -> None:
    clock = Clock()
    heats = HeadHeat(clock)
    for _ in range(60):
        for tail in range(8):
            heats.note(asked(prompt(HEAD, (100 + tail, 3))), decided(20))
        assert heats.settle()[0].share == 1.0
        clock.pass_s(heat.HALF_LIFE_S)
    assert heats._unit < heat.MAX_GROWTH


def test_short_heads_pins_retries_and_lone_prompts_are_nothing() -> None:
    heats = HeadHeat(Clock())
    for tail in range(10):
        heats.note(asked(prompt((1, 3), (100 + tail, 3))), decided(3))
        heats.note(asked(prompt(HEAD, (100 + tail, 3)), pin="r0"), decided(20))
        heats.note(asked(prompt(HEAD, (100 + tail, 3))), decided(20, attempt=2))
        heats.note(asked(prompt((500 + tail, 30))), decided(0))
        heats.note(asked(KeyChain(b"", b"")), decided(0))
    assert heats.settle() == []


def test_a_public_prefix_is_a_head_even_before_it_is_held() -> None:
    heats = HeadHeat(Clock())
    for tail in range(heat.MIN_REQUESTS):
        heats.note(asked(prompt(HEAD, (100 + tail, 3)), public_cut_blocks=20), decided(0))
    assert [head.blocks for head in heats.settle()] == [20]


def test_R9_everything_stays_within_its_bounds_and_the_hot_one_is_not_lost(monkeypatch) -> None:
    monkeypatch.setattr(heat, "MAX_SPOTS", 64)
    monkeypatch.setattr(heat, "MAX_DEPTHS", 16)
    monkeypatch.setattr(heat, "HEADS_BYTES", 3_000)
    clock, rng = Clock(), random.Random(3)
    heats = HeadHeat(clock)
    for number in range(60):
        for _ in range(heat.SAMPLE_REQUESTS):
            blocks = rng.randrange(8, 200)
            keys = KeyChain(rng.randbytes(KEY_BYTES * blocks), b"")
            heats.note(asked(keys), decided(blocks))
        for tail in range(4):
            heats.note(asked(prompt(HEAD, (100 + tail, 3))), decided(20))
        heats.settle()
        clock.pass_s(0.5)
        assert len(heats._spots) <= 2 * 64
        assert len(heats._depths) <= 2 * 16
        assert len(heats._watched) <= heat.WATCHED_DEPTHS
        assert heats.head_bytes <= 3_000
        assert not heats._sample, number
    assert 20 in {head.blocks for head in heats.heads}


def test_of_a_flood_a_sample_is_counted_for_all() -> None:
    heats = HeadHeat(Clock())
    for tail in range(4 * heat.SAMPLE_REQUESTS):
        heats.note(asked(prompt(HEAD, (100 + tail % 5, 3))), decided(20))
    assert len(heats._sample) == heat.SAMPLE_REQUESTS
    (head,) = heats.settle()
    assert head.share == 1.0
    assert head.requests_per_s > 10


def test_O8_nothing_that_is_printed_of_a_head_tells_its_prompt() -> None:
    heats = HeadHeat(Clock())
    for _ in range(8):
        heats.note(asked(prompt(HEAD)), decided(20))
    (head,) = heats.settle()
    shown = repr(head)
    assert "prompt" not in shown
    assert head.chain.data.hex() not in shown
    assert repr(head.key) not in shown
