"""Marks of cold prefixes: siblings meet over several routers."""

from __future__ import annotations

from events.envelope import seal
from events.peer import PeerDelta, PeerState
from events.wire import encode
from router.cluster.marks import STEP_BLOCKS, Marks, marks_of
from router.cluster.sync import MAX_MARKS_BYTES
from tests.router.cluster.rig import Router, sent
from tests.router.kit import Clock, World, prompt


def test_siblings_of_a_cold_prefix_meet_although_they_come_over_two_routers() -> None:
    """A head of 40 blocks; the tails differ. Without marks the idle replicas would tempt."""
    for seed in range(8):
        world, other = World(replicas=8, seed=seed), World(replicas=8, seed=100 + seed)
        head, placed = (seed, 40), world.decide(prompt((seed, 40), (500, 3)))
        marks = marks_of(prompt(head, (500, 3)), 0)
        other.brain.peers.hear(
            "b", 1, 1, PeerDelta((sent(1, placed.replica, marks=marks),)), other.clock()
        )
        sibling = other.decide(prompt(head, (501, 3)))
        assert sibling.replica == placed.replica
        assert sibling.predicted_cached_tokens >= 32 * 16
        assert other.decide(prompt((900 + seed, 43))).predicted_cached_tokens == 0


def test_marks_vouch_for_what_is_shared_to_the_step_and_never_for_more() -> None:
    for known, shared, more in [(0, 200, 3), (0, 5, 9), (100, 120, 0), (150, 300, 7), (63, 64, 1)]:
        sent_chain = prompt((1, shared), (2, more)) if more else prompt((1, shared))
        asked = prompt((1, shared), (3, 11))
        marks = Marks()
        marks.add("r0", marks_of(sent_chain, known), 10.0)
        replica, depth = marks.deepest(asked, known, 9.0)
        assert replica == "r0"
        assert shared - STEP_BLOCKS < depth <= shared


def test_marks_end_by_time_by_number_and_with_their_replica() -> None:
    keys = prompt((1, 20))
    marks = Marks(limit=8)
    marks.add("r0", marks_of(keys, 0), 10.0)
    assert marks.deepest(keys, 0, 9.0) == ("r0", 16)
    assert marks.deepest(keys, 0, 10.0) is None
    assert marks.deepest(prompt((9, 20)), 0, 9.0) is None
    marks.add("r1", marks_of(keys, 11), 20.0)
    assert marks.deepest(keys, 0, 9.0) == ("r1", 16)
    marks.expire(10.0)
    assert len(marks) == 2
    marks.forget_replica("r1")
    assert len(marks) == 0
    for seed in range(9):
        marks.add("r0", marks_of(prompt((seed, 20)), 0), 10.0)
    assert len(marks) <= 8
    assert marks_of(keys, 20) == b""


def test_marks_that_would_make_a_message_too_long_stay_at_home() -> None:
    router = Router("a", 1, Clock(), {"r0": 1})
    router.listen()
    router.hear("b", seal("b", 1, 0, 1, PeerState()))
    for seed in range(2):
        router.world.decide(prompt((seed, 900)), pin="r0")
    delta = router.sync._delta()
    assert all(one.marks for one in delta.sent)
    assert len(encode(delta)) < 8_192
    for one in router.sync._changes.sent.values():
        one.marks = bytes(MAX_MARKS_BYTES)
    assert not any(one.marks for one in router.sync._delta().sent)
