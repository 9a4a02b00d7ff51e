"""The engine thread while adapters load: it sleeps, wakes, tells failures, and ends with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.adapter_loader import FakeAdapters
from tests.fakes.runner import FakeRunner
from tests.replica.engine.rig import EngineRig, running
from tests.replica.sched.rig import ROOT, chain_of, sampling, tokens_of
from tests.waiting import wait_until

Running = tuple[EngineRig, FakeRunner, FakeAdapters]


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def rig(request: pytest.FixtureRequest) -> Iterator[Running]:
    adapters = FakeAdapters("x", "y")
    with running(adapters=adapters, overlap=request.param) as (made, runner):
        yield made, runner, adapters


def ask(rig: EngineRig, seed: int, adapter: str = "", tokens: int = 6) -> int:
    prompt = tokens_of(seed, 9)
    keys = chain_of(prompt, rig.block_tokens, root=ROOT + adapter.encode())
    given = (adapter, "digest") if adapter else None
    return rig.submit(prompt, sampling(tokens), chain=keys, adapter=given)


def test_who_waits_for_an_adapter_starts_when_it_is_there(rig: Running) -> None:
    engine, runner, adapters = rig
    child, beside = ask(engine, 1, "x"), ask(engine, 1)
    engine.assert_right(runner, beside)
    wait_until(lambda: adapters.open == ["x"])
    assert not engine.sink.ended(child)
    adapters.finish("x")
    engine.assert_right(runner, child)
    state = engine.engine.load().adapters
    assert (state.resident, state.in_use, state.loads) == (("x",), 0, 1)
    assert state.load_ms["x"] > 0
    assert engine.engine.load().later["adapter"] > 0
    engine.assert_nothing_left()


def test_a_failed_load_ends_those_who_wait_alone(rig: Running) -> None:
    engine, runner, adapters = rig
    child = ask(engine, 1, "x")
    wait_until(lambda: adapters.open == ["x"])
    adapters.finish("x", loaded=False)
    error = engine.sink.end_of(child).error
    assert error is not None
    assert error.code == "adapter_load_failed"
    again = ask(engine, 1, "x")
    wait_until(lambda: adapters.open == ["x"])
    adapters.finish("x")
    engine.assert_right(runner, again)
    assert engine.engine.load().adapters.failures == 1


def test_an_abort_while_it_loads_leaves_nothing(rig: Running) -> None:
    engine, runner, adapters = rig
    child = ask(engine, 1, "x")
    wait_until(lambda: adapters.open == ["x"])
    engine.engine.abort(child)
    assert engine.sink.end_of(child).finish == "abort"
    adapters.finish("x")
    engine.assert_right(runner, ask(engine, 2, "x"))
    engine.assert_nothing_left()


def test_the_engine_ends_while_one_loads(rig: Running) -> None:
    engine, _, adapters = rig
    child = ask(engine, 1, "x")
    wait_until(lambda: adapters.open == ["x"])
    engine.engine.close()
    assert engine.sink.end_of(child).finish == "error"
