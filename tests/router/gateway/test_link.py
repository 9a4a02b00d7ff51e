"""The link: sinks before sends, one end per attempt, allowed addresses, nothing late gets in."""

from __future__ import annotations

import asyncio

import pytest

from events.errors import (
    ADAPTER_LOAD_FAILED,
    ADAPTER_NOT_FINITE,
    QUEUE_LONGER,
    CoreError,
    UserError,
)
from events.request import Abort, SamplingParams
from router.dispatch import link as link_module
from router.dispatch.failover import RetryBudget
from router.dispatch.introduction import LinkTarget
from tests.fakes.scripts import Call, die_in_stream, echo, refuse, silent
from tests.router.gateway.rig import Rig, collect
from tests.waiting import PATIENCE_S, until

BUSY = CoreError(status=429, message="full", code="queue_full", retry_after_s=3, reroute=True)


async def test_an_answer_inside_submit_is_not_lost(rig: Rig) -> None:
    assert await collect(rig.run()) == "one two three"
    assert rig.chooser.statuses == ["ok"]
    assert len(rig.chooser.first_tokens) == 1
    await until(rig.idle)


async def test_children_are_told_apart(rig: Rig) -> None:
    run = rig.run(sampling=SamplingParams(max_tokens=8, seed=1, n=3))
    texts = {0: "", 1: "", 2: ""}
    with run:
        while not run.done:
            for delta in await run.next(1.0):
                texts[delta.child] += delta.text
    assert set(texts.values()) == {"one two three"}


async def test_R1_load_is_booked_before_the_answer(rig: Rig) -> None:
    for replica in rig.replicas:
        replica.script = silent
    runs = [rig.run() for _ in range(8)]
    tasks = [asyncio.create_task(collect(run)) for run in runs]
    await asyncio.gather(*(replica.wait_calls(4) for replica in rig.replicas))
    assert rig.chooser.booked == {"r0": 4, "r1": 4}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(rig.idle)
    assert rig.chooser.statuses == ["client_gone"] * 8


async def test_R15_link_loss_fails_each_attempt_once_and_it_is_retried(rig: Rig) -> None:
    async def die(call):
        call.replica.break_links()

    rig.replicas[0].script = die
    assert await collect(rig.run()) == "one two three"
    assert rig.chooser.statuses == ["transport", "ok"]
    assert rig.chooser.outcomes[0][1].replica_fault
    assert rig.replicas[1].calls[0].request.attempt == 2


async def test_R16_no_retry_after_the_first_delta_where_nobody_can_continue(rig: Rig) -> None:
    for link in rig.links.all():
        link.continues = False
    rig.replicas[0].script = die_in_stream
    run = rig.run()
    texts: list[str] = []
    with pytest.raises(UserError) as caught:
        await collect(run, texts)
    assert caught.value.error.status == 503
    assert "".join(texts) == "one two"
    assert not rig.replicas[1].calls
    assert not run.done


async def test_reroute_is_retried_elsewhere_and_is_no_fault(rig: Rig) -> None:
    rig.replicas[0].script = refuse(BUSY)
    assert await collect(rig.run()) == "one two three"
    assert rig.chooser.statuses == ["refused", "ok"]
    assert not rig.chooser.outcomes[0][1].replica_fault


@pytest.mark.parametrize("code", [ADAPTER_LOAD_FAILED, ADAPTER_NOT_FINITE])
async def test_R11_what_only_an_adapter_is_to_blame_for_is_no_fault(rig: Rig, code: str) -> None:
    rig.replicas[0].script = refuse(CoreError(status=500, message="it", code=code))
    assert await collect(rig.run()) == "one two three"
    assert rig.chooser.statuses == ["error", "ok"]
    assert not rig.chooser.outcomes[0][1].replica_fault


async def test_who_only_rerouted_is_asked_again_when_the_other_one_dies(rig: Rig) -> None:
    longer = CoreError(status=429, message="longer", code=QUEUE_LONGER, reroute=True)

    async def busy_once(call: Call) -> None:
        await (call.refuse(longer) if call.request.attempt == 1 else call.answer())

    async def die(call: Call) -> None:
        call.replica.break_links()

    rig.replicas[0].script, rig.replicas[1].script = busy_once, die
    assert await collect(rig.run()) == "one two three"
    assert rig.chooser.statuses == ["refused", "transport", "ok"]


async def test_a_refusal_everywhere_is_told_as_it_is(rig: Rig) -> None:
    for replica in rig.replicas:
        replica.script = refuse(BUSY)
    with pytest.raises(UserError) as caught:
        await collect(rig.run())
    assert caught.value.error == BUSY
    await until(rig.idle)


async def test_R11_a_callers_mistake_is_not_retried_and_no_fault(rig: Rig) -> None:
    mistake = CoreError(status=400, message="too long", code="context_length_exceeded")
    rig.replicas[0].script = refuse(mistake)
    with pytest.raises(UserError) as caught:
        await collect(rig.run())
    assert caught.value.error == mistake
    assert [outcome.replica_fault for _, outcome in rig.chooser.outcomes] == [False]
    assert not rig.replicas[1].calls


async def test_retries_share_a_budget(rig: Rig) -> None:
    rig.budget = RetryBudget(ratio=0.2, most=1.0)
    for replica in rig.replicas:
        replica.script = refuse(CoreError(status=500, message="broken", type="server_error"))
    for _ in range(3):
        with pytest.raises(UserError):
            await collect(rig.run())
    assert sum(len(replica.calls) for replica in rig.replicas) == 4


async def test_R10_nobody_linked_is_503_with_retry_after(rig: Rig) -> None:
    for replica in rig.replicas:
        await replica.die()
    await until(lambda: not rig.links.up())
    with pytest.raises(UserError) as caught:
        await collect(rig.run())
    assert caught.value.error.status == 503
    assert caught.value.error.retry_after_s >= 1


async def test_first_token_deadline(rig: Rig) -> None:
    rig.replicas[0].script = silent
    with pytest.raises(UserError) as caught:
        await collect(rig.run(first_token_timeout_s=0.1))
    assert caught.value.error.status == 504
    assert "first token" in caught.value.error.message
    assert rig.chooser.statuses == ["timeout"]
    assert rig.chooser.outcomes[0][1].replica_fault
    await until(rig.idle)
    assert rig.replicas[0].calls[0].aborted.is_set()


async def test_idle_next_returns_nothing_and_loses_nothing(rig: Rig) -> None:
    gate = asyncio.Event()

    async def late(call):
        await gate.wait()
        await call.answer()

    rig.replicas[0].script = late
    run = rig.run()
    with run:
        assert await run.next(0.02) == ()
        assert await run.next(0.02) == ()
        gate.set()
        assert (await run.next(1.0))[0].text.startswith("one")
    assert len(rig.replicas[0].calls) == 1


async def test_late_and_foreign_deltas_are_dropped_and_counted(rig: Rig) -> None:
    done = asyncio.Event()

    async def stubborn(call):
        await call.aborted.wait()
        await call.send("late")
        await call.send("foreign", attempt=99)
        await call.send("ghost", child=17)
        done.set()

    rig.replicas[0].script = stubborn
    task = asyncio.create_task(collect(rig.run()))
    await rig.replicas[0].wait_calls(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await done.wait()
    await until(lambda: rig.links.get("r0").attempts.late_deltas == 3)
    rig.replicas[0].script = echo
    assert await collect(rig.run()) == "one two three"


async def test_answers_after_the_end_are_dropped(rig: Rig) -> None:
    async def twice(call):
        await call.answer()
        await call.answer()

    rig.replicas[0].script = twice
    assert await collect(rig.run()) == "one two three"
    await until(lambda: rig.links.get("r0").attempts.late_deltas > 0)


async def test_O5_a_slow_reader_is_held_then_aborted(rig: Rig) -> None:
    async def flood(call):
        while not call.aborted.is_set():
            if call.held.is_set():
                await call.aborted.wait()
                return
            await call.send("x" * 100)

    rig.replicas[0].script = flood
    run = rig.run()
    with run:
        await run.next(1.0)
        call = rig.replicas[0].calls[0]
        await asyncio.wait_for(call.aborted.wait(), PATIENCE_S)
        assert call.held.is_set()
        with pytest.raises(UserError) as caught:
            await run.next(1.0)
    assert caught.value.error.code == "slow_reader"
    assert not rig.chooser.outcomes[0][1].replica_fault
    await until(rig.idle)


async def test_O5_a_reader_that_comes_back_resumes(rig: Rig) -> None:
    async def wait_for_credit(call):
        while not call.held.is_set():
            await call.send("x" * 100)
            await asyncio.sleep(0)
        await call.resumed.wait()
        await call.send("end", finish="stop")

    rig.replicas[0].script = wait_for_credit
    run = rig.run()
    with run:
        await run.next(1.0)
        await rig.replicas[0].calls[0].held.wait()
        text = ""
        while not run.done:
            batch = await run.next(1.0)
            assert len(batch) <= 1, "what waited for one child is merged"
            text += "".join(delta.text for delta in batch)
    assert text.endswith("end")
    assert rig.chooser.statuses == ["ok"]


async def test_P17_one_huge_delta_passes(rig: Rig) -> None:
    async def huge(call):
        await call.send("y" * 2_000_000)
        await call.send("z" * 2_000_000, finish="stop")

    rig.replicas[0].script = huge
    assert len(await collect(rig.run())) == 4_000_000


async def test_R17_a_malformed_frame_is_a_broken_link(rig: Rig) -> None:
    async def garbage(call):
        await call.send("one")
        await call.ws.send_bytes(b"\xc1 not msgpack")

    rig.replicas[0].script = garbage
    assert await collect(rig.run()) == "one two three"
    assert rig.chooser.statuses == ["transport", "ok"]
    await until(lambda: rig.links.get("r0").counts["malformed"] == 1)
    await rig.up()


async def test_R15_a_socket_that_takes_nothing_is_given_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deafen(call):
        call.replica.stop_reading()

    monkeypatch.setattr(link_module, "SEND_S", 0.2)
    rig.replicas[0].script = deafen
    asking = asyncio.create_task(collect(rig.run()))
    await rig.replicas[0].wait_calls(1)
    link = rig.links.get("r0")
    while link.unsent_bytes == 0:
        link.control(Abort(request_id="x" * 1_000_000, attempt=1))
        await asyncio.sleep(0)
    await until(lambda: link.unsent_s > 0)
    assert await asyncio.wait_for(asking, PATIENCE_S) == "one two three"
    assert rig.chooser.statuses == ["transport", "ok"]
    assert rig.links.get("r1").unsent_s == 0


async def test_clear_cache_waits_for_the_answer(rig: Rig) -> None:
    assert await rig.links.get("r0").clear_cache(2.0) == 7
    assert rig.replicas[0].cleared == 1


async def test_reconnects_after_a_break(rig: Rig) -> None:
    rig.replicas[0].break_links()
    await until(lambda: len(rig.replicas[0].hellos) == 2)
    await rig.up()


async def test_E8_a_link_of_another_boot_is_fenced(rig: Rig) -> None:
    rig.replicas[0].boot = 5
    rig.replicas[0].break_links()
    await until(lambda: rig.links.get("r0").counts["fenced"] >= 1)
    assert rig.chooser.linked == {"r1"}
    rig.targets[0] = LinkTarget("r0", 5, rig.replicas[0].url)
    await rig.up()


async def test_E8_a_larger_boot_ends_what_runs_on_the_old_life(rig: Rig) -> None:
    rig.replicas[0].script = silent
    task = asyncio.create_task(collect(rig.run()))
    await rig.replicas[0].wait_calls(1)
    rig.replicas[0].boot = 9
    rig.targets[0] = LinkTarget("r0", 9, rig.replicas[0].url)
    assert await asyncio.wait_for(task, PATIENCE_S) == "one two three"
    assert rig.chooser.statuses == ["transport", "ok"]


async def test_R20_a_replica_that_left_finishes_its_streams(rig: Rig) -> None:
    gate = asyncio.Event()

    async def two_parts(call):
        await call.send("one")
        await gate.wait()
        await call.send(" two", finish="stop")

    rig.replicas[0].script = two_parts
    run = rig.run()
    with run:
        await run.next(1.0)
        gone = rig.targets.pop(0)
        await until(lambda: rig.links.get("r0") is None)
        gate.set()
        assert (await run.next(1.0))[0].text == " two"
        assert run.done
    await until(lambda: rig.links.in_flight == 0)
    rig.targets.append(gone)
    await rig.up()


async def test_R9_what_was_sent_is_not_kept_for_one_that_never_resumes(rig: Rig) -> None:
    for _ in range(3):
        assert await collect(rig.run()) == "one two three"
    assert [link._outgoing._sent_bytes for link in rig.links.all()] == [0, 0]
