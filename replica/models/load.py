"""Weights from a model's files to the device, one tensor at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.model.weights import Weights
from replica.models.kernels import Kernels, Linear
from replica.models.llama import LayerWeights, LlamaWeights


@dataclass(frozen=True, slots=True)
class _Loader:
    source: Weights
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device

    def stacked(self, names: list[str], dtype: torch.dtype) -> Tensor:
        """Tensors put together along their first axis."""
        parts = []
        for name in names:
            array = self.source.tensor(name)
            array = array if array.flags.writeable else array.copy()
            parts.append(torch.from_numpy(array).to(dtype))
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).to(self.device)

    def linear(self, *modules: str, bias: bool = False) -> Linear:
        """Matrices stacked along their outputs, in the model's dtype."""
        weight = self.stacked([f"{module}.weight" for module in modules], self.dtype)
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
                self.stacked([f"{name}.mlp.gate_proj.weight"], self.dtype),
                self.stacked([f"{name}.mlp.up_proj.weight"], self.dtype),
            ),
            down=self.linear(f"{name}.mlp.down_proj"),
        )


def load_llama(
    source: Weights, kernels: Kernels, dtype: torch.dtype, device: torch.device
) -> LlamaWeights:
    """All weights of a Llama-family model. Raises what `source` raises (ModelError)."""
    load = _Loader(source, kernels, dtype, device)
    embedding = load.stacked(["model.embed_tokens.weight"], dtype)
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(load.layer(index) for index in range(source.shape.layers)),
        final_norm=load.norm("model.norm"),
        head=kernels.linear(embedding) if source.shape.tied_head else load.linear("lm_head"),
    )
