"""What is counted adds up: every token of a prompt is either found or computed, whoever counts."""

from __future__ import annotations

import random

import pytest

from replica.engine.report import report
from replica.engine.seen import SeenDispatches
from replica.sched.policies import POLICIES
from tests.replica.sched.rig import Bench, sampling, tokens_of


def chaos(seed: int) -> Bench:
    """Shared heads, little room, loads from below, holds, retractions: all of it to the end."""
    rng = random.Random(seed)
    bench = Bench(
        rng.choice((14, 24, 64)),
        4,
        max_step_tokens=rng.choice((5, 16, 40)),
        max_running=rng.choice((2, 6)),
        horizon_tokens=rng.choice((1, 8)),
        retract_every_steps=rng.choice((0, 5)),
        tiered=rng.random() < 0.5,
        policy=POLICIES[rng.choice(list(POLICIES))](),
    )
    for index in range(30):
        prompt = (*tokens_of(index % 4, rng.randint(4, 24)), *tokens_of(index, rng.randint(1, 9)))
        bench.add(prompt, sampling(rng.randint(1, 9)), priority=rng.randint(0, 1))
        child = rng.randint(1, index + 1)
        word = rng.choice((bench.scheduler.lifecycle.hold, bench.scheduler.lifecycle.resume))
        word(child)
        if rng.random() < 0.6:
            bench.step()
        if bench.tiers is not None:
            bench.tiers.finish_all()
    for child in bench.specs:
        bench.scheduler.lifecycle.resume(child)
    bench.run()
    return bench


@pytest.mark.parametrize("seed", range(8))
def test_O7_every_prompt_token_is_a_hit_or_a_miss_and_all_counters_agree(seed: int) -> None:
    bench = chaos(seed)
    bench.assert_right()
    bench.assert_empty()
    load = report(bench.scheduler, SeenDispatches(), 0.0, True, 0, 0)
    last = [outputs[-1] for outputs in bench.outputs.values()]
    queried = sum(len(spec.prompt) for spec in bench.specs.values())
    hits = sum(output.cached_tokens for output in last)
    assert load.prompt_tokens_total == queried
    assert load.cached_tokens_total == hits
    answered = sum(len(bench.tokens(child)) for child in bench.specs)
    # The last token of an answer is never fed back.
    fed = answered - len(bench.specs)
    again = sum(output.recomputed_tokens for output in last)
    assert load.recomputed_tokens_total == again
    misses = bench.runner.tokens - fed - again
    assert hits + misses == queried
    assert (load.waiting, load.running, load.held_requests, load.held_blocks) == (0, 0, 0, 0)
    assert (load.queued_prefill_tokens, load.running_context_tokens) == (0, 0)


def test_what_was_had_before_two_preemptions_is_no_hit_when_it_is_found_again() -> None:
    """28 tokens are found; all is lost; 20 are computed again, and lost; then another one's blocks
    are found. A hit is what the request was spared: still 28."""
    bench = Bench(64, 4, max_step_tokens=10)
    prompt = tokens_of(1, 41)
    bench.add(prompt[:30], sampling(1))
    bench.run()
    child = bench.add(prompt, sampling(3))
    request = bench.scheduler.table.get(child)
    assert request is not None
    for _ in range(2):
        bench.step()
        bench.step()
        bench.scheduler.lifecycle.preempt(request)
        bench.scheduler.clear_cache()
    bench.scheduler.lifecycle.hold(child)
    bench.add(prompt, sampling(1))
    bench.run()
    bench.scheduler.lifecycle.resume(child)
    bench.run()
    bench.assert_right()
    bench.assert_empty()
    assert bench.cached(child) == 28
    assert bench.outputs[child][-1].recomputed_tokens == 21
