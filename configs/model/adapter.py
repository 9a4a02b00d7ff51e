"""A LoRA adapter in a folder as PEFT saves it: adapter_config.json and adapter_model.safetensors.

Taken is what the engine applies: low-rank pairs beside the seven projections of the Llama family.
Everything else that PEFT can say is refused by name: leaving it out would change the output. The
file is read whole, never mapped, since it may be replaced while a replica runs; pickles are never
read.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.model.errors import ModelError
from configs.model.metadata import Metadata
from configs.model.safetensors import Place, read_json, read_places
from configs.model.shape import ModelShape

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_BYTES = 1 << 32
GATED_SITE = ("mlp.gate_proj", "mlp.up_proj")
SITES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    GATED_SITE,
    ("mlp.down_proj",),
)
"""Of one layer: what an adapter may change, and what of it the engine computes in one product."""

MODULES = tuple(module for site in SITES for module in site)
RANK_MULTIPLE = 32
"""In memory the ranks of a site are filled up with zeros: what the kernels' tiles take."""

_NAME = re.compile(
    r"base_model\.model\.model\.layers\.(0|[1-9][0-9]{0,3})\.([a-z_]+\.[a-z_]+)\.lora_([AB])\.weight"
)
_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "fan_in_fan_out",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "arrow_config",
    "use_bdlora",
)
"""What changes the result in ways that aren't computed here: absent, null, false or empty."""

_INITS = ("gaussian", "eva", "orthogonal")
"""Named starts of training that leave the model's own weights alone; of the others (PiSSA, OLoRA,
CorDA, LoftQ) the pairs go with other weights than the model's."""

_LARGEST = float(np.finfo(np.float32).max)


def module_sizes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each of MODULES in this model."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden, inner = shape.hidden, shape.intermediate
    sizes = (
        (hidden, query),
        (hidden, key),
        (hidden, key),
        (query, hidden),
        (hidden, inner),
        (hidden, inner),
        (inner, hidden),
    )
    return dict(zip(MODULES, sizes, strict=True))


def site_rank(ranks: Iterable[int]) -> int:
    """The rank of one site in memory."""
    return -(-sum(ranks) // RANK_MULTIPLE) * RANK_MULTIPLE


def held_numbers(shape: ModelShape, rank: int) -> int:
    """How many numbers an adapter of this rank beside all MODULES has in memory."""
    sizes, numbers = module_sizes(shape), 0
    for site in SITES:
        width = sizes[site[0]][0] + sum(sizes[module][1] for module in site)
        numbers += site_rank([rank] * len(site)) * width
    return shape.layers * numbers


@dataclass(frozen=True, slots=True)
class LowRank:
    """One pair: the module's output gains `scale` * x @ down.T @ up.T. down: [rank, inputs], up:
    [outputs, rank], float32."""

    down: NDArray[np.float32]
    up: NDArray[np.float32]
    scale: float


class AdapterFile:
    """An adapter for a model of one shape, checked whole and held in memory."""

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        """Raises ModelError for a folder that is malformed, unsafe, not supported, or not of this
        model."""
        if not (folder / CONFIG_FILE).exists():
            raise ModelError(
                f"adapter {folder}: no {CONFIG_FILE} in it; an adapter is a folder as PEFT saves it"
            )
        try:
            self.rank, self.scale = _read_config(read_json(folder / CONFIG_FILE))
            self._places = _read_weights(folder)
            _check(self._places, self.rank, shape)
            _check_numbers(self._places, self.scale)
        except ModelError as error:
            raise ModelError(f"adapter {folder}: {error}") from error
        self._sizes = module_sizes(shape)

    @property
    def bytes(self) -> int:
        """What its tensors take in the file."""
        return sum(place.raw().nbytes for place in self._places.values())

    def digest(self) -> str:
        """Hex digest over what decides its effect: rank, scale, and every byte of every tensor."""
        found = hashlib.sha256(f"wr-adapter-1 {self.rank} {self.scale!r}\n".encode())
        for name in sorted(self._places):
            place = self._places[name]
            found.update(f"{name} {place.shape} {place.encoding.name}\n".encode())
            found.update(place.raw().data)
        return found.hexdigest()

    def pair(self, layer: int, module: str) -> LowRank | None:
        """What it adds to one of MODULES in one layer; None for nothing."""
        names = [_tensor_name(layer, module, half) for half in "AB"]
        if names[0] not in self._places:
            return None
        down, up = (self._places[name].decoded() for name in names)
        return LowRank(down, up, self.scale)


def _tensor_name(layer: int, module: str, half: str) -> str:
    return f"base_model.model.model.layers.{layer}.{module}.lora_{half}.weight"


def _read_config(config: dict[str, Any]) -> tuple[int, float]:
    """Rank and scale. Raises ModelError for what isn't supported."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"peft_type '{kind}' is not supported (only LORA)")
    for name in _UNSUPPORTED:
        if config.get(name):
            raise ModelError(f"'{name}' is not supported")
    if config.get("bias", "none") != "none":
        raise ModelError("'bias' is not supported (only none)")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init not in _INITS:
        raise ModelError(f"'init_lora_weights' {init!r} is not supported: it changes the model")
    targets = config.get("target_modules")
    known = {module.rpartition(".")[2] for module in MODULES}
    if isinstance(targets, list):
        strange = sorted({str(each).rpartition(".")[2] for each in targets} - known)
        if strange:
            raise ModelError(
                f"target module '{strange[0]}' is not supported (only {', '.join(sorted(known))})"
            )
    given = Metadata({key: value for key, value in config.items() if value is not None})
    rank, alpha = given.count("r"), given.number("lora_alpha")
    if not math.isfinite(alpha):
        raise ModelError(f"'lora_alpha' is {alpha}")
    try:
        return rank, alpha / (rank**0.5 if given.flag("use_rslora", False) else rank)
    except OverflowError:
        raise ModelError(f"'r' is a number of {rank.bit_length()} bits") from None


def _read_weights(folder: Path) -> dict[str, Place]:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        pickles = sorted(each.name for each in folder.glob("adapter_model.*"))
        found = f"; {pickles[0]} is not read" if pickles else ""
        raise ModelError(f"no {WEIGHTS_FILE}: only safetensors are loaded{found}")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelError(f"more than {MAX_BYTES >> 20} MiB")
        return read_places(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{WEIGHTS_FILE}: {error}") from error


def _check(places: dict[str, Place], rank: int, shape: ModelShape) -> None:
    """Every tensor known, in its pair, and of the right size."""
    sizes = module_sizes(shape)
    if not places:
        raise ModelError("it has no tensors")
    for name, place in places.items():
        match = _NAME.fullmatch(name)
        if match is None or match[2] not in sizes:
            raise ModelError(f"tensor '{name}' is not supported")
        layer, module, half = int(match[1]), match[2], match[3]
        if layer >= shape.layers:
            raise ModelError(f"tensor '{name}': the model has {shape.layers} layers")
        if _tensor_name(layer, module, "B" if half == "A" else "A") not in places:
            raise ModelError(f"tensor '{name}' has no other half")
        inputs, outputs = sizes[module]
        wanted = (rank, inputs) if half == "A" else (outputs, rank)
        if place.shape != wanted:
            raise ModelError(f"tensor '{name}' has shape {place.shape}, not {wanted}")


def _check_numbers(places: dict[str, Place], scale: float) -> None:
    """Every number finite, scaled too: a single other one spoils all that is computed with it, and
    would look like a replica's fault, request by request."""
    for name, place in places.items():
        numbers = place.decoded()
        largest = max(abs(float(numbers.min())), abs(float(numbers.max())))
        factor = abs(scale) if name.endswith(".lora_B.weight") else 1.0
        if not largest * factor <= _LARGEST:  # NaN isn't, either
            raise ModelError(f"tensor '{name}' has numbers that are not finite")


@dataclass(frozen=True, slots=True)
class AdapterCard:
    """Who an adapter is, without its tensors. `bytes`: what they take in the file; `read_ms`: how
    long it took to read and check them."""

    name: str
    path: Path
    digest: str
    rank: int
    bytes: int
    read_ms: float


def adapter_card(name: str, path: Path, shape: ModelShape) -> AdapterCard:
    """Reads the adapter whole, once. Raises ModelError."""
    began_s = time.monotonic()
    file = AdapterFile(path, shape)
    digest = file.digest()
    read_ms = 1e3 * (time.monotonic() - began_s)
    return AdapterCard(name, path, digest, file.rank, file.bytes, read_ms)
