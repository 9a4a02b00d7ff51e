"""A Llama-family model in a GGUF file: its shape, its weights under canonical names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from configs.model.errors import ModelError
from configs.model.gguf import GGUFFile
from configs.model.metadata import Metadata
from configs.model.shape import ModelShape, check_tensors

_Number = TypeVar("_Number", bound=np.generic)

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _canonical(name: str) -> str:
    """The canonical name of a GGUF tensor; one that isn't known keeps its name."""
    if name in _TOP:
        return _TOP[name]
    match name.split("."):
        case ["blk", layer, part, kind] if part in _LAYER:
            return f"model.layers.{layer}.{_LAYER[part]}.{kind}"
    return name


def _refuse_variants(metadata: Metadata, arch: str, tensors: dict[str, object]) -> None:
    """Variants of the family whose forward pass differs from ours."""
    if f"{arch}.expert_count" in metadata:
        raise ModelError("mixtures of experts are not supported")
    scaling = metadata.string(f"{arch}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise ModelError("scaled rotary embeddings are not supported")


def _vocab(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError("no tensor 'token_embd.weight'")
    return embedding.shape[0]


def read_shape(file: GGUFFile) -> ModelShape:
    """The model's shape. Raises ModelError for an architecture or variant that isn't supported."""
    metadata = Metadata(file.metadata)
    arch = metadata.string("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"architecture '{arch}' is not supported (only {known})")
    _refuse_variants(metadata, arch, dict(file.tensors))
    hidden = metadata.count(f"{arch}.embedding_length")
    heads = metadata.count(f"{arch}.attention.head_count")
    head_dim = metadata.count(f"{arch}.attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.count(f"{arch}.{key}", head_dim) != head_dim:
            raise ModelError(f"'{arch}.{key}' differs from the head size {head_dim}")
    context = metadata.count(f"{arch}.context_length")
    return ModelShape(
        arch=arch,
        layers=metadata.count(f"{arch}.block_count"),
        hidden=hidden,
        intermediate=metadata.count(f"{arch}.feed_forward_length"),
        heads=heads,
        kv_heads=metadata.count(f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=_vocab(file),
        rope_theta=metadata.number(f"{arch}.rope.freq_base", 10_000.0),
        rms_eps=metadata.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        context_tokens=min(context, metadata.count(f"{arch}.attention.sliding_window", context)),
        tied_head="output.weight" not in file.tensors,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
    )


def _unpermuted(weight: NDArray[_Number], heads: int) -> NDArray[_Number]:
    """Rows of q or k from GGUF's interleaved pairs to halves, head by head."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


class GGUFWeights:
    """The weights in a GGUF file (see configs.model.weights.Weights)."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError for a file that is malformed, incomplete or not supported."""
        self.file = GGUFFile(path)
        self._source = {_canonical(name): name for name in self.file.tensors}
        try:
            self.shape = read_shape(self.file)
            check_tensors(self.shape, self._sizes())
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._source)

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self._ordered(name, self.file.tensor(self._source.get(name, name)))

    def encoding(self, name: str) -> str:
        return self.file.info(self._source.get(name, name)).encoding.name

    def encoded(self, name: str) -> NDArray[np.uint8]:
        source = self._source.get(name, name)
        rows = prod(self.file.info(source).shape[:-1])
        return self._ordered(name, self.file.blocks(source).reshape(rows, -1))

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"wr-weights-gguf-1 {self.shape}".encode())
        for name in sorted(self.file.tensors):
            info = self.file.tensors[name]
            digest.update(f"{name} {info.shape} {info.encoding.name}\n".encode())
            digest.update(self.file.blocks(name).data)
        return digest.hexdigest()

    def _ordered(self, name: str, rows: NDArray[_Number]) -> NDArray[_Number]:
        """Rows as Hugging Face has them."""
        if self.shape.arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = self.shape.heads if "q_proj" in name else self.shape.kv_heads
            return _unpermuted(rows, heads)
        return rows

    def _sizes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, source in self._source.items():
            yield name, self.file.tensors[source].shape
