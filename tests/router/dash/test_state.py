"""What the page shows is built from bus messages alone, and bounded."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from events.alarm import AlarmNotice
from events.decision import RouteDecision, RouteOutcome
from events.envelope import seal
from events.load import DecodeFit, PrefillFit, ReplicaBye, ReplicaLoad
from router.dash.state import ALARM_GONE_S, MAX_ALARMS, MAX_DECISIONS, MAX_REPLICAS, DashboardState


def load(**more) -> ReplicaLoad:
    settings = {
        "digest_generation": 1,
        "digest_seq": 4,
        "waiting": 2,
        "running": 3,
        "queued_prefill_tokens": 99,
        "running_context_tokens": 100,
        "free_blocks": 10,
        "cached_blocks": 20,
        "total_blocks": 40,
        "step_ms": 1.5,
        "prefill": PrefillFit(0, 1, 0, 1),
        "decode": DecodeFit(0, 1, 0, 1),
        "seen": {},
        "draining": False,
        "engine_steps": 7,
        "digest_false_positive_rate": 0.0,
        "prompt_tokens_total": 1,
        "cached_tokens_total": 1,
        "preemptions_total": 0,
    }
    return ReplicaLoad(**{**settings, **more})


def say(state: DashboardState, name: str, kind: str, payload, *, boot=5, seq=4, now=1.0) -> None:
    state.take(f"wr.v1.c.replica.{name}.{kind}", seal(name, boot, 1, seq, payload), now)


def decision(name: str) -> bytes:
    return msgspec.msgpack.encode(
        (
            RouteDecision(
                decision_id=name,
                request_id="q",
                tenant="t",
                policy="p",
                replica="r0",
                dispatch_seq=1,
                attempt=1,
                prompt_tokens=10,
                predicted_cached_tokens=5,
                predicted_ttft_ms=1.0,
                reason="best",
                candidates=(),
                decided_us=1.0,
                wall_time_ms=0,
            ),
        )
    )


def outcome(name: str, now_ms: int = 0) -> bytes:
    return msgspec.msgpack.encode(
        (
            RouteOutcome(
                decision_id=name,
                replica="r0",
                status="ok",
                cached_tokens=6,
                prompt_tokens=10,
                completion_tokens=2,
                ttft_ms=3.0,
                e2e_ms=4.0,
                wall_time_ms=now_ms,
            ),
        )
    )


def test_a_replica_with_its_digest_age() -> None:
    state = DashboardState()
    say(state, "r0", "digest", ReplicaBye(reason=""), seq=4, now=1.0)
    say(state, "r0", "load", load(), now=3.0)
    (view,) = state.view(3.5)["replicas"]
    assert (view["waiting"], view["running"], view["cached_blocks"]) == (2, 3, 20)
    assert view["digest_age_ms"] == 500
    say(state, "r0", "load", load(digest_seq=9), now=5.0)
    assert state.view(5.0)["replicas"][0]["digest_age_ms"] == 2000


def test_E8_a_new_life_hides_the_old_one() -> None:
    state = DashboardState()
    say(state, "r0", "load", load(waiting=9), boot=6)
    say(state, "r0", "load", load(waiting=1), boot=5)
    assert state.view(1.0)["replicas"][0]["waiting"] == 9
    say(state, "r0", "bye", ReplicaBye(reason="stop"), boot=6)
    assert state.view(1.0)["replicas"] == []


def test_silence_takes_a_replica_off_the_page() -> None:
    state = DashboardState()
    say(state, "r0", "load", load(), now=1.0)
    assert state.view(100.0)["replicas"] == []


def test_decisions_meet_their_outcomes() -> None:
    state = DashboardState()
    state.take("wr.v1.c.router.x.decisions", decision("d1"), 1.0)
    assert state.view(1.0)["decisions"][0]["outcome"] is None
    state.take("wr.v1.c.router.x.outcomes", outcome("d1"), 2.0)
    view = state.view(4.0)
    assert view["decisions"][0]["outcome"]["cached_tokens"] == 6
    assert view["seconds"] == [[2, 10, 6]]


def test_everything_is_bounded() -> None:
    state = DashboardState()
    for number in range(MAX_DECISIONS * 2):
        state.take("wr.v1.c.router.x.decisions", decision(f"d{number}"), 1.0)
    for number in range(MAX_REPLICAS + 5):
        say(state, f"r{number}", "load", load())
    view = state.view(1.0)
    assert len(view["decisions"]) == MAX_DECISIONS
    assert len(view["replicas"]) == MAX_REPLICAS


def alarm(name: str, replica: str = "r0", active: bool = True, age_ms: float = 2_000.0) -> bytes:
    return msgspec.msgpack.encode(
        AlarmNotice(
            name=name,
            replica=replica,
            active=active,
            age_ms=age_ms,
            count=1,
            detail="why",
            wall_time_ms=0,
        )
    )


def test_alarms_come_age_and_go() -> None:
    state = DashboardState()
    state.take("wr.v1.c.router.x.alarm", alarm("stale_digest"), 1.0)
    state.take("wr.v1.c.router.y.alarm", alarm("no_events", "r1"), 1.0)
    first, second = state.view(2.0)["alarms"]
    assert (first["name"], first["replica"], first["router"]) == ("no_events", "r1", "y")
    assert (second["name"], second["age_ms"], second["detail"]) == ("stale_digest", 3_000, "why")
    state.take("wr.v1.c.router.y.alarm", alarm("stale_digest", active=False), 3.0)
    state.take("wr.v1.c.router.y.alarm", alarm("no_events", "r1", active=False), 3.0)
    assert [of["router"] for of in state.view(3.0)["alarms"]] == ["x"]
    assert state.view(1.0 + ALARM_GONE_S + 1)["alarms"] == []


def test_alarms_are_bounded() -> None:
    state = DashboardState()
    for number in range(MAX_ALARMS + 5):
        state.take("wr.v1.c.router.x.alarm", alarm(f"a{number}"), 1.0)
    assert len(state.view(1.0)["alarms"]) == MAX_ALARMS
    state.take("wr.v1.c.router.x.alarm", alarm("late"), 1.0 + 2 * ALARM_GONE_S)
    assert [of["name"] for of in state.view(1.0 + 2 * ALARM_GONE_S)["alarms"]] == ["late"]


def test_S1_an_alarm_that_makes_no_sense_is_malformed() -> None:
    state = DashboardState()
    for payload in (alarm("x" * 65), alarm("a b"), alarm("a", age_ms=float("inf"))):
        state.take("wr.v1.c.router.x.alarm", payload, 1.0)
    assert (state.malformed, state.view(1.0)["alarms"]) == (3, [])


@given(
    st.sampled_from(["hello", "load", "digest", "bye", "decisions", "outcomes", "alarm", "x"]),
    st.sampled_from(["replica", "router", "other"]),
    st.binary(max_size=60),
)
def test_S1_garbage_is_counted_and_nothing_else(kind: str, role: str, payload: bytes) -> None:
    state = DashboardState()
    state.take(f"wr.v1.c.{role}.n.{kind}", payload, 1.0)
    state.take("no.such.subject", payload, 1.0)
    assert state.malformed >= 1
    assert state.view(1.0)["decisions"] == []
