"""The bank: loads off the engine's thread, and what is not what was told of never gets in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread

import pytest
import torch

from configs.model.adapter import WEIGHTS_FILE, AdapterFile, adapter_card
from replica.lora.bank import ABREAST, MAX_STUCK, AdapterBank
from replica.lora.weights import AdapterWeights, DeltaBuilder, LoadStoppedError
from replica.models.torch_kernels import TorchKernels
from tests.fakes.adapters import write_adapter
from tests.replica.models.weights import small_shape
from tests.waiting import wait_until

SHAPE = small_shape()
SHORT_S = 0.05


class SlowBuilder(DeltaBuilder):
    """Builds of some names hang, as on a disk that doesn't answer."""

    def __init__(self) -> None:
        super().__init__(SHAPE, TorchKernels(1e-5), torch.float32, torch.device("cpu"))
        self.hangs: dict[str, Event] = {}

    def build(self, name: str, file: AdapterFile, stopped: Callable[[], bool]) -> AdapterWeights:
        if name in self.hangs:
            self.hangs[name].wait()
        return super().build(name, file, stopped)


class World:
    """A bank of adapters in folders, and what it told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.landed: SimpleQueue[tuple[str, bool]] = SimpleQueue()
        self.builder = SlowBuilder()
        self.banks: list[AdapterBank] = []

    def bank(self, *names: str, hang: Sequence[str] = (), load_s: float = 60.0) -> AdapterBank:
        cards = {
            name: adapter_card(name, write_adapter(self.folder / name, SHAPE), SHAPE)
            for name in (*names, *hang)
        }
        self.builder.hangs = {name: Event() for name in hang}
        bank = AdapterBank(cards, SHAPE, self.builder, load_s)
        bank.attach(lambda name, loaded: self.landed.put((name, loaded)))
        self.banks.append(bank)
        return bank

    def heal(self, name: str) -> None:
        """The disk answers at last."""
        self.builder.hangs.pop(name).set()

    def next(self) -> tuple[str, bool]:
        return self.landed.get(timeout=60)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    for bank in world.banks:
        bank.close()
    for name in list(world.builder.hangs):
        world.heal(name)


def test_an_adapter_comes_and_goes(world: World) -> None:
    bank = world.bank("x")
    assert bank.names == {"x"}
    bank.load("x")
    assert world.next() == ("x", True)
    assert bank.weights["x"].name == "x"
    bank.drop("x")
    assert not bank.weights


def test_another_content_under_the_name_is_a_failed_load(world: World) -> None:
    bank, folder = world.bank("x"), world.folder / "x"
    whole = (folder / WEIGHTS_FILE).read_bytes()
    write_adapter(folder, SHAPE, seed=9)
    bank.load("x")
    assert world.next() == ("x", False)
    (folder / WEIGHTS_FILE).write_bytes(whole[:1000])
    bank.load("x")
    assert world.next() == ("x", False)
    assert not bank.weights
    (folder / WEIGHTS_FILE).write_bytes(whole)
    bank.load("x")
    assert world.next() == ("x", True)


def test_a_load_that_hangs_holds_up_nobody(world: World) -> None:
    bank = world.bank("x", "y", hang=["stuck"])
    for name in ("stuck", "x", "y"):
        bank.load(name)
    assert [world.next(), world.next()] == [("x", True), ("y", True)]


def test_a_load_that_hangs_fails_in_time_and_what_it_brings_later_is_dropped(world: World) -> None:
    names = [f"stuck{at}" for at in range(ABREAST)]
    bank = world.bank("x", hang=names, load_s=SHORT_S)
    for name in names:
        bank.load(name)
    bank.load_s = 60.0
    bank.load("x")
    ends = [world.next() for _ in range(ABREAST + 1)]
    assert sorted(ends) == [*((name, False) for name in names), ("x", True)]
    assert bank.stuck == set(names)
    # It is not tried again while it hangs; the answer comes at once.
    bank.load(names[0])
    assert world.next() == (names[0], False)
    world.heal(names[0])
    wait_until(lambda: bank.stuck == set(names[1:]))
    assert names[0] not in bank.weights
    with pytest.raises(Empty):
        world.landed.get_nowait()
    bank.load(names[0])
    assert world.next() == (names[0], True)


def test_where_too_many_hang_nothing_is_begun_until_one_ends(world: World) -> None:
    names = [f"stuck{at}" for at in range(MAX_STUCK)]
    bank = world.bank("x", hang=names, load_s=SHORT_S)
    for name in names:
        bank.load(name)
    assert sorted(world.next() for _ in names) == [(name, False) for name in names]
    bank.load_s = 60.0
    bank.load("x")
    assert world.next() == ("x", False)
    world.heal(names[0])
    wait_until(lambda: len(bank.stuck) < MAX_STUCK)
    bank.load("x")
    assert world.next() == ("x", True)


def test_without_a_thread_for_it_a_load_fails(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    bank = world.bank("x", "y")
    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", start)
        for name in ("x", "y"):
            bank.load(name)
            assert world.next() == (name, False)
    for name in ("x", "y"):
        bank.load(name)
        assert world.next() == (name, True)


def test_a_closed_bank_tells_nothing_more(world: World) -> None:
    bank = world.bank("x", hang=["stuck"])
    bank.load("stuck")
    bank.close()
    bank.load("x")
    world.heal("stuck")
    with pytest.raises(Empty):
        world.landed.get(timeout=0.1)
    assert not bank.weights


def test_what_is_not_wanted_any_more_stops_between_two_layers(world: World) -> None:
    file = AdapterFile(write_adapter(world.folder / "x", SHAPE), SHAPE)
    asked: list[int] = []

    def stopped() -> bool:
        asked.append(len(asked))
        return len(asked) > 1

    with pytest.raises(LoadStoppedError):
        world.builder.build("x", file, stopped)
    assert len(asked) == 2 <= SHAPE.layers
