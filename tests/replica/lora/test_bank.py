"""The bank: loads off the engine's thread, and what is not what was told of never gets in."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

import torch

from configs.model.adapter import WEIGHTS_FILE, adapter_card
from replica.lora.bank import AdapterBank
from replica.lora.weights import DeltaBuilder
from replica.models.torch_kernels import TorchKernels
from tests.fakes.adapters import write_adapter
from tests.replica.models.weights import small_shape

SHAPE = small_shape()


def bank_of(folder: Path) -> tuple[AdapterBank, SimpleQueue[tuple[str, bool]]]:
    builder = DeltaBuilder(SHAPE, TorchKernels(1e-5), torch.float32, torch.device("cpu"))
    bank = AdapterBank({"x": adapter_card("x", folder, SHAPE)}, SHAPE, builder)
    landed: SimpleQueue[tuple[str, bool]] = SimpleQueue()
    bank.attach(lambda name, loaded: landed.put((name, loaded)))
    return bank, landed


def test_an_adapter_comes_and_goes(tmp_path: Path) -> None:
    bank, landed = bank_of(write_adapter(tmp_path, SHAPE))
    assert bank.names == {"x"}
    bank.load("x")
    assert landed.get(timeout=60) == ("x", True)
    assert bank.weights["x"].name == "x"
    bank.drop("x")
    assert not bank.weights
    bank.close()


def test_another_content_under_the_name_is_a_failed_load(tmp_path: Path) -> None:
    bank, landed = bank_of(write_adapter(tmp_path, SHAPE))
    whole = (tmp_path / WEIGHTS_FILE).read_bytes()
    write_adapter(tmp_path, SHAPE, seed=9)
    bank.load("x")
    assert landed.get(timeout=60) == ("x", False)
    (tmp_path / WEIGHTS_FILE).write_bytes(whole[:1000])
    bank.load("x")
    assert landed.get(timeout=60) == ("x", False)
    assert not bank.weights
    (tmp_path / WEIGHTS_FILE).write_bytes(whole)
    bank.load("x")
    assert landed.get(timeout=60) == ("x", True)
    bank.close()
