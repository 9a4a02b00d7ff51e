"""LoRA adapters as PEFT saves them, random and small, and a model with one merged into it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from configs.model.adapter import CONFIG_FILE, MODULES, WEIGHTS_FILE, AdapterFile, module_sizes
from configs.model.shape import ModelShape
from configs.model.weights import Weights


def adapter_config(rank: int = 4, **changes: object) -> dict[str, object]:
    """What PEFT writes, as far as anybody reads it."""
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
        "target_modules": [module.rpartition(".")[2] for module in MODULES],
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "base_model_name_or_path": "somewhere/else",
        **changes,
    }


def adapter_tensors(
    shape: ModelShape,
    rank: int = 4,
    seed: int = 0,
    modules: Sequence[str] = MODULES,
    size: float = 1.0,
) -> dict[str, NDArray[np.float32]]:
    """Pairs beside `modules` of all layers; `size` 1 changes a layer about as much as it is."""
    rng, found = np.random.default_rng(seed), {}
    for layer in range(shape.layers):
        for module, (inputs, outputs) in module_sizes(shape).items():
            if module not in modules:
                continue
            name = f"base_model.model.model.layers.{layer}.{module}"
            down = rng.standard_normal((rank, inputs)) / inputs**0.5
            up = size * rng.standard_normal((outputs, rank)) / rank**0.5
            found[f"{name}.lora_A.weight"] = down.astype(np.float32)
            found[f"{name}.lora_B.weight"] = up.astype(np.float32)
    return found


def save_adapter(
    folder: Path, tensors: dict[str, NDArray[np.float32]], config: dict[str, object]
) -> Path:
    """The folder, made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS_FILE)
    return folder


def write_adapter(
    folder: Path,
    shape: ModelShape,
    *,
    rank: int = 4,
    seed: int = 0,
    modules: Sequence[str] = MODULES,
    size: float = 1.0,
    **config: object,
) -> Path:
    """A random adapter for a model of this shape."""
    tensors = adapter_tensors(shape, rank, seed, modules, size)
    return save_adapter(folder, tensors, adapter_config(rank, **config))


class MergedWeights:
    """The weights of a model into which an adapter was merged: what its output has to equal."""

    def __init__(self, source: Weights, adapter: AdapterFile) -> None:
        self.shape = source.shape
        self.names = source.names
        self.fingerprint = source.fingerprint
        self.encoding = source.encoding
        self.encoded = source.encoded
        self._tensors = {name: _merged(name, source, adapter) for name in source.names}

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self._tensors[name]


def _merged(name: str, source: Weights, adapter: AdapterFile) -> NDArray[np.float32]:
    weight = source.tensor(name)
    match name.split("."):
        case ["model", "layers", layer, *module, "weight"]:
            pair = adapter.pair(int(layer), ".".join(module))
            return weight if pair is None else weight + pair.scale * pair.up @ pair.down
    return weight
