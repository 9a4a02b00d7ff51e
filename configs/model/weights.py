"""Weights behind one interface, whatever the file: canonical names, float32, one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from configs.model.llama_gguf import GGUFWeights
from configs.model.safetensors import FolderWeights
from configs.model.shape import ModelShape


class Weights(Protocol):
    """The weights of one model. Nothing is decoded before it is asked for, nothing is kept."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names, such as "model.layers.0.self_attn.q_proj.weight"."""

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One weight, rows in Hugging Face's order. May be a read-only view of the file.

        Raises ModelError for an unknown name.
        """

    def encoding(self, name: str) -> str:
        """How the file holds a weight, by the encoding's name. Raises ModelError."""

    def encoded(self, name: str) -> NDArray[np.uint8]:
        """The same weight as the file holds it, [rows, bytes of a row]. Raises ModelError."""

    def fingerprint(self) -> str:
        """Hex digest over the shape and every byte of every tensor. Reads the whole file."""


def open_weights(path: Path) -> Weights:
    """The weights of a GGUF file or of a folder with safetensors. Raises ModelError."""
    return FolderWeights(path) if path.is_dir() else GGUFWeights(path)
