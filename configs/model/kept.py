"""Which matrices stay in memory as their file holds them, where `weights = "q4"` asks for that.

Those in 4 bits, and what a file of 4-bit weights holds beside them in 8. Matrices that are computed
as one stay only where the file holds all of them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from configs.load import ConfigError
from configs.model.shape import computed_with, tensor_shapes
from configs.model.weights import Weights

Q4 = "Q4_1"
KEPT = (Q4, "Q8_0")


@dataclass(frozen=True, slots=True)
class Kept:
    """How many weights stay as blocks, the bytes of those, and whether the embedding is one."""

    parameters: int = 0
    bytes: int = 0
    embedding: bool = False


NOTHING_KEPT = Kept()


def require_q4(weights: Weights, path: Path) -> None:
    """Raises ConfigError where the model at `path` holds no weights that `q4` is about."""
    if not has_q4(weights):
        held = ", ".join(sorted({weights.encoding(name) for name in weights.names}))
        raise ConfigError(f"weights 'q4' needs a GGUF file with {Q4} weights; {path} holds {held}")


def has_q4(weights: Weights) -> bool:
    """Whether `q4` is to be had of this model."""
    return any(weights.encoding(name) == Q4 for name in weights.names)


def kept_encoding(weights: Weights, names: Sequence[str]) -> str | None:
    """The encoding that all of these matrices keep, or None where they become numbers."""
    found = {weights.encoding(name) for name in names}
    return found.pop() if len(found) == 1 and found <= set(KEPT) else None


def kept(weights: Weights) -> Kept:
    """The sum over all of the model's matrices."""
    numbers, size = 0, 0
    for name, shape in tensor_shapes(weights.shape).items():
        if len(shape) == 2 and kept_encoding(weights, computed_with(name)):
            numbers += prod(shape)
            size += weights.encoded(name).nbytes
    embedding = kept_encoding(weights, ("model.embed_tokens.weight",)) is not None
    return Kept(numbers, size, embedding)
