"""Weights from a model's files to the device, one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.model.kept import kept_encoding
from configs.model.shape import computed_with
from configs.model.weights import Weights
from replica.models.blocks import BlockMatrix, Matrix
from replica.models.kernels import Kernels, Linear
from replica.models.llama import LayerWeights, LlamaWeights


def _tensor(array: NDArray[Any]) -> Tensor:
    """Of a view of the file its copy."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


@dataclass(frozen=True, slots=True)
class _Loader:
    source: Weights
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device
    keep_blocks: bool

    def stacked(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """Tensors put together along their first axis."""
        return self._joined([_tensor(self.source.tensor(name)).to(dtype) for name in names])

    def matrix(self, *modules: str) -> Matrix:
        """Matrices stacked along their outputs: the file's blocks where these are kept, else in the
        model's dtype."""
        names = [f"{module}.weight" for module in modules]
        encoding = self._kept(names[0]) if self.keep_blocks else None
        if encoding is None:
            return self.stacked(names, self.dtype)
        blocks = self._joined([_tensor(self.source.encoded(name)) for name in names])
        return BlockMatrix(blocks, encoding, self.dtype)

    def _kept(self, name: str) -> str | None:
        return kept_encoding(self.source, computed_with(name))

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).to(self.device)

    def linear(self, *modules: str, bias: bool = False) -> Linear:
        """One product of matrices stacked along their outputs."""
        weight = self.matrix(*modules)
        if not bias:
            return self.kernels.linear(weight)
        return self.kernels.linear(
            weight, self.stacked([f"{module}.bias" for module in modules], self.dtype)
        )

    def norm(self, module: str) -> Tensor:
        """A norm's weight stays float32."""
        return self.stacked([f"{module}.weight"], torch.float32)

    def head_norm(self, attention: str) -> Tensor | None:
        """Weights of the norm of each query and key head, or None where the model has none."""
        shape = self.source.shape
        if not shape.qk_norm:
            return None
        query, key = self.norm(f"{attention}.q_norm"), self.norm(f"{attention}.k_norm")
        return torch.cat((query.expand(shape.heads, -1), key.expand(shape.kv_heads, -1)))

    def layer(self, index: int) -> LayerWeights:
        name = f"model.layers.{index}"
        attention = f"{name}.self_attn"
        projections = (f"{attention}.{part}_proj" for part in ("q", "k", "v"))
        return LayerWeights(
            attention_norm=self.norm(f"{name}.input_layernorm"),
            qkv=self.linear(*projections, bias=self.source.shape.qkv_bias),
            head_norm=self.head_norm(attention),
            output=self.linear(f"{attention}.o_proj"),
            mlp_norm=self.norm(f"{name}.post_attention_layernorm"),
            gated=self.kernels.gated(
                self.matrix(f"{name}.mlp.gate_proj"), self.matrix(f"{name}.mlp.up_proj")
            ),
            down=self.linear(f"{name}.mlp.down_proj"),
        )


def load_llama(
    source: Weights,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
    *,
    keep_blocks: bool = False,
) -> LlamaWeights:
    """All weights of a Llama-family model; with `keep_blocks` those of configs.model.kept stay as
    the file holds them. Raises what `source` raises (ModelError)."""
    load = _Loader(source, kernels, dtype, device, keep_blocks)
    weight = load.matrix("model.embed_tokens")
    if source.shape.tied_head:
        embedding, head = kernels.tied(weight)
    else:
        embedding, head = kernels.embedding(weight), load.linear("lm_head")
    return LlamaWeights(
        dtype=dtype,
        embedding=embedding,
        layers=tuple(load.layer(index) for index in range(source.shape.layers)),
        final_norm=load.norm("model.norm"),
        head=head,
    )
