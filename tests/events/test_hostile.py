"""S1: bytes that nobody of ours would send, on every subject; nothing happens, all goes on."""

from __future__ import annotations

import asyncio
import pickle
import random

import pytest

from events.envelope import seal
from events.feed import Feed
from events.subjects import replica_subject, roll_call_subject, snapshot_subject
from tests.events.conftest import Town
from tests.events.helpers import CLUSTER, hello, stored
from tests.events.test_nats import make_ends
from tests.waiting import until

KINDS = ("hello", "load", "digest", "bye", "surprise")


class Exploit:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("pwned",)


def frames(count: int, seed: int) -> list[bytes]:
    rng = random.Random(seed)
    good = seal("r0", 1, 1, 1, hello())
    made = [
        pickle.dumps(Exploit()),
        b"",
        b"null",
        b"{}",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ]
    while len(made) < count:
        frame = bytearray(good if rng.random() < 0.5 else rng.randbytes(rng.randint(1, 200)))
        for _ in range(rng.randint(1, 4)):
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        made.append(bytes(frame[: rng.randint(1, len(frame))]))
    return made


async def test_S1_ten_thousand_frames_do_nothing(
    town: Town, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    ends = await make_ends(town)
    await ends.publisher.start()
    await ends.feed.start()
    await until(ends.in_sync)
    attacker, router = await town.replica("r1"), await town.router()
    hostile = frames(1_700, seed=1)
    for frame in hostile:
        for kind in KINDS:
            await attacker.publish(replica_subject(CLUSTER, "r1", kind), frame)
        await router.publish(roll_call_subject(CLUSTER), frame)
        await router.publish(snapshot_subject(CLUSTER, "r0"), frame)
        await asyncio.sleep(0)
    for frame in hostile[:60]:
        with pytest.raises(TimeoutError):
            await router.request(snapshot_subject(CLUSTER, "r0"), frame, 0.001)
    ends.engine.facts = stored(1, 2, 3)
    await until(lambda: len(ends.publisher.residency) == 3 and ends.in_sync())
    assert set(ends.listener.present) <= {"r0"}
    await until(lambda: ends.feed.stats.malformed == len(KINDS) * len(hostile))
    assert ends.listener.broken == []
    assert ends.publisher.failures == 0
    assert ends.router.stats.handler_failures == 0
    assert "pwned" not in capsys.readouterr().out + caplog.text
    await ends.publisher.close()
    await ends.feed.close()


async def test_S1_a_replica_is_heard_only_under_its_own_name(town: Town) -> None:
    ends = await make_ends(town)
    await ends.feed.start()
    attacker = await town.replica("r1")
    await attacker.publish(replica_subject(CLUSTER, "r1", "hello"), seal("r0", 9, 1, 0, hello()))
    await attacker.publish(replica_subject(CLUSTER, "r0", "hello"), seal("r0", 9, 1, 0, hello()))
    await until(lambda: ends.feed.stats.malformed == 1 and attacker.stats.refused == 1)
    assert ends.listener.present == {}
    assert isinstance(ends.feed, Feed)
    await ends.feed.close()
