"""Liveness, metrics, logs, and the way from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from events.request import Abort
from replica.engine.messages import StepOutput
from replica.front.health import Progress
from replica.front.output import StepQueue
from replica.sched.plan import PlanId
from tests.fakes.engine import ScriptedEngine
from tests.replica.front.rig import request, rig
from tests.waiting import PATIENCE_S, until

CANARY = b"canary-7391"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_progress_is_steps_while_there_is_work() -> None:
    clock = Clock()
    engine = ScriptedEngine(lambda output: None)
    progress = Progress(10.0, clock)
    assert progress.healthy(engine.load(), has_work=True)
    clock.now_s += 60
    assert progress.healthy(engine.load(), has_work=False), "an idle engine need not step"
    clock.now_s += 9
    assert progress.healthy(engine.load(), has_work=True), "the clock starts with the work"
    clock.now_s += 2
    assert not progress.healthy(engine.load(), has_work=True)
    engine.steps += 1
    assert progress.healthy(engine.load(), has_work=True)
    engine.alive = False
    assert not progress.healthy(engine.load(), has_work=False)


async def test_health_tells_a_stalled_engine_from_a_held_request() -> None:
    async with rig(progress_s=0.0) as front:
        router = await front.dial()
        await router.send(request())
        await front.submitted()
        await front.get("/health")
        assert (await front.get("/health"))[0] == 503
        assert (await front.get("/ready"))[0] == 503
        front.engine.step({front.engine.requests[0].child: b"x"}, finish="stop")
        await router.answer()


async def test_O7_gauges_come_back_to_zero() -> None:
    async with rig() as front:
        router = await front.dial()
        for name in ("a", "b", "c"):
            await router.send(request(name, n=2))
        await front.submitted(6)
        metrics = (await front.get("/metrics"))[1]
        assert "warmroute_replica_attempts 3.0" in metrics
        assert "warmroute_replica_children 6.0" in metrics
        await router.send(Abort(request_id="a", attempt=1))
        front.engine.step({r.child: b"x" for r in front.engine.requests[2:4]}, finish="length")
        await router.answer("b", child=1)
        await router.socket.close()
        await until(front.empty)
        metrics = (await front.get("/metrics"))[1]
        for name in ("attempts", "children"):
            assert f"warmroute_replica_{name} 0.0" in metrics
        assert 'children_finished_total{reason="length"} 2.0' in metrics
        assert 'children_finished_total{reason="abort"} 4.0' in metrics
        await until(lambda: not front.engine.open)


async def test_O8_a_canary_is_neither_logged_nor_in_metrics_nor_in_refusals(caplog) -> None:
    caplog.set_level(logging.INFO)
    text = CANARY.decode()
    async with rig(answers_aborts=False) as front:
        router = await front.dial()
        await router.send(request(prompt=CANARY + b"\0" * 9, stop=(text,), salt=CANARY))
        await router.send(request("b", prompt=list(CANARY), model=text, tenant=text))
        await router.send(request(text, prompt=list(CANARY), stop=(text + "!",)))
        await front.submitted()
        front.engine.step({front.engine.requests[0].child: (*CANARY, 299)})
        refusals = [await router.answer("r1"), await router.answer("b")]
        await router.answer(text)
        await router.socket.send_bytes(b"\x81\xa1" + CANARY)
        await router.closed()
        reader, writer = await asyncio.open_connection(*front.url[7:].split(":"))
        writer.write(b"GET / HTTP/1.1\r\n" + CANARY + b"\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            await reader.read()
        writer.close()
        shown = caplog.text + (await front.get("/metrics"))[1]
        assert "bad request" in caplog.text
        assert "can't be shown" in caplog.text
        assert text not in shown + repr([answer.finish for answer in refusals])


async def test_steps_before_the_handler_and_from_a_thread_arrive_in_order() -> None:
    queue = StepQueue(asyncio.get_running_loop())
    got: list[int] = []
    done = asyncio.Event()

    def handle(step: StepOutput, now_s: float) -> None:
        got.append(step.plan_id)
        if step.plan_id == 999:
            done.set()

    queue(StepOutput(PlanId(0), ()))
    queue.attach(handle)
    assert got == [0]

    def run() -> None:
        for number in range(1, 1000):
            queue(StepOutput(PlanId(number), ()))

    thread = threading.Thread(target=run)
    thread.start()
    async with asyncio.timeout(PATIENCE_S):
        await done.wait()
    thread.join()
    assert got == list(range(1000))


@pytest.mark.filterwarnings("default")
def test_a_step_after_the_loop_has_closed_is_dropped() -> None:
    loop = asyncio.new_event_loop()
    queue = StepQueue(loop)
    loop.close()
    queue(StepOutput(PlanId(1), ()))
