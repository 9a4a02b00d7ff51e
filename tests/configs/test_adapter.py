"""Adapters as PEFT saves them: what is read, what is refused, and what makes two of them one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from configs.model.adapter import CONFIG_FILE, WEIGHTS_FILE, AdapterFile
from configs.model.errors import ModelError
from tests.fakes.adapters import adapter_config, adapter_tensors, save_adapter, write_adapter
from tests.replica.models.weights import small_shape

SHAPE = small_shape()
Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj"


def digest_of(folder: Path) -> str:
    return AdapterFile(folder, SHAPE).digest()


def test_pairs_come_with_their_scale(tmp_path: Path) -> None:
    write_adapter(tmp_path, SHAPE, rank=4, modules=("self_attn.q_proj",), lora_alpha=6)
    file = AdapterFile(tmp_path, SHAPE)
    tensors = adapter_tensors(SHAPE, 4, modules=("self_attn.q_proj",))
    pair = file.pair(1, "self_attn.q_proj")
    assert pair is not None
    assert pair.scale == 1.5
    np.testing.assert_array_equal(pair.down, tensors[f"{Q_PROJ}.lora_A.weight"])
    np.testing.assert_array_equal(pair.up, tensors[f"{Q_PROJ}.lora_B.weight"])
    assert file.pair(1, "self_attn.k_proj") is None
    assert file.bytes == sum(array.nbytes for array in tensors.values())


def test_a_folder_without_an_adapter_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="in it; an adapter is a folder as PEFT"):
        AdapterFile(tmp_path / "missing", SHAPE)


def test_rank_stabilised_scale(tmp_path: Path) -> None:
    write_adapter(tmp_path, SHAPE, rank=4, lora_alpha=6.0, use_rslora=True)
    assert AdapterFile(tmp_path, SHAPE).scale == 3.0


def test_the_digest_is_of_what_decides_the_effect(tmp_path: Path) -> None:
    first = digest_of(write_adapter(tmp_path / "a", SHAPE))
    same = {"base_model_name_or_path": "elsewhere", "inference_mode": True, "lora_dropout": 0.1}
    assert digest_of(write_adapter(tmp_path / "b", SHAPE, **same)) == first
    others = [
        write_adapter(tmp_path / "c", SHAPE, seed=1),
        write_adapter(tmp_path / "d", SHAPE, lora_alpha=9),
        write_adapter(tmp_path / "e", SHAPE, use_rslora=True),
        write_adapter(tmp_path / "f", SHAPE, modules=("mlp.up_proj",)),
    ]
    assert len({first, *map(digest_of, others)}) == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"bias": "all"}, "'bias'"),
        ({"use_dora": True}, "'use_dora'"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save'"),
        ({"rank_pattern": {"q_proj": 8}}, "'rank_pattern'"),
        ({"alpha_pattern": {"q_proj": 8}}, "'alpha_pattern'"),
        ({"fan_in_fan_out": True}, "'fan_in_fan_out'"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "target module 'embed_tokens'"),
        ({"r": 0}, "'r' must be above zero"),
        ({"r": 8}, "has shape"),
        ({"r": None}, "'r' is missing"),
        ({"lora_alpha": float("inf")}, "'lora_alpha' is inf"),
        ({"lora_alpha": "16"}, "'lora_alpha' must be float"),
        ({"lora_alpha": 10**400}, "'lora_alpha' is a number of 1329 bits"),
        ({"lora_alpha": 1e300}, "not finite"),
        ({"r": 10**400}, "'r' is a number of 1329 bits"),
        ({"r": 10**400, "use_rslora": True}, "'r' is a number of 1329 bits"),
        ({"init_lora_weights": "pissa_niter_16"}, "'init_lora_weights' 'pissa_niter_16'"),
        ({"alora_invocation_tokens": [1, 2]}, "'alora_invocation_tokens'"),
        ({"arrow_config": {"top_k": 2}}, "'arrow_config'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    write_adapter(tmp_path, SHAPE, **changes)
    with pytest.raises(ModelError, match=words):
        AdapterFile(tmp_path, SHAPE)


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        (f"{Q_PROJ}.lora_A.weight", (4, 63), "has shape"),
        (f"{Q_PROJ}.lora_B.weight", (127, 4), "has shape"),
        (f"{Q_PROJ}.lora_magnitude_vector", (128,), "is not supported"),
        ("base_model.model.lm_head.lora_A.weight", (4, 64), "is not supported"),
        ("base_model.model.model.layers.2.mlp.up_proj.lora_A.weight", (4, 64), "2 layers"),
        ("model.layers.0.mlp.up_proj.weight", (4, 64), "is not supported"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, size: tuple[int, ...], words: str
) -> None:
    tensors = adapter_tensors(SHAPE) | {name: np.zeros(size, np.float32)}
    with pytest.raises(ModelError, match=words):
        AdapterFile(save_adapter(tmp_path, tensors, adapter_config()), SHAPE)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, number: float) -> None:
    tensors = adapter_tensors(SHAPE)
    tensors[f"{Q_PROJ}.lora_B.weight"][3, 1] = number
    with pytest.raises(ModelError, match=r"q_proj.lora_B.weight' has numbers that are not finite"):
        AdapterFile(save_adapter(tmp_path, tensors, adapter_config()), SHAPE)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_pipes_and_devices_are_never_read(tmp_path: Path, name: str) -> None:
    write_adapter(tmp_path, SHAPE)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match=name):
        AdapterFile(tmp_path, SHAPE)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ModelError, match=name):
        AdapterFile(tmp_path, SHAPE)


def test_half_a_pair_is_refused(tmp_path: Path) -> None:
    tensors = adapter_tensors(SHAPE)
    del tensors[f"{Q_PROJ}.lora_B.weight"]
    with pytest.raises(ModelError, match="no other half"):
        AdapterFile(save_adapter(tmp_path, tensors, adapter_config()), SHAPE)


def test_a_pickle_is_never_read(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text(json.dumps(adapter_config()))
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ModelError, match="only safetensors are loaded; adapter_model"):
        AdapterFile(tmp_path, SHAPE)


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=CONFIG_FILE):
        AdapterFile(tmp_path, SHAPE)
    write_adapter(tmp_path, SHAPE)
    whole = (tmp_path / WEIGHTS_FILE).read_bytes()
    for broken in (b"", whole[:5], whole[:40], whole[:-1], b"\xff" * 64):
        (tmp_path / WEIGHTS_FILE).write_bytes(broken)
        with pytest.raises(ModelError, match=WEIGHTS_FILE):
            AdapterFile(tmp_path, SHAPE)
    save_file({}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(ModelError, match="no tensors"):
        AdapterFile(tmp_path, SHAPE)
