"""How large a model is: its weights, its KV per token, what a step needs. Pure arithmetic."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.model.kept import NOTHING_KEPT, Kept, kept
from configs.model.shape import tensor_shapes
from configs.model.weights import Weights
from tools.errors import CommandError

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """`latent_dim` above 0: multi-head latent attention, which keeps so many numbers a layer and
    token (compressed KV and the rotated key), whatever the heads. `parameters` 0: not known.
    `kept`: those of them that may stay as the file's blocks."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    parameters: int
    tied_head: bool
    latent_dim: int = 0
    kept: Kept = NOTHING_KEPT

    @property
    def attention(self) -> str:
        """MHA, GQA, MQA or MLA."""
        if self.latent_dim:
            return "MLA"
        if self.kv_heads == self.heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"

    def kv_numbers(self, tensor_parallel: int) -> int:
        """Numbers that one token keeps in the KV of one device.

        Heads are dealt out; where there are fewer than devices each device has one. Latents can't
        be dealt out: each device keeps them whole.
        """
        if self.latent_dim:
            return self.layers * self.latent_dim
        return 2 * self.layers * math.ceil(self.kv_heads / tensor_parallel) * self.head_dim

    def formula(self, tensor_parallel: int) -> str:
        """The same in words."""
        if self.latent_dim:
            return f"{self.layers} layers x {self.latent_dim} latent"
        heads = math.ceil(self.kv_heads / tensor_parallel)
        return f"2 x {self.layers} layers x {heads} KV heads x {self.head_dim}"

    def activation_bytes(self, step_tokens: int, rows: int, element: int, parallel: int) -> int:
        """The most that one step holds beside weights and KV in plain torch (native kernels need
        less): the residual in float32; of one layer two normed states, the projections, the rotated
        query and what is attended to; the gated product's halves and what becomes of them in
        float32; float32 logits with as much again for sampling."""
        heads = (3 * self.heads + 2 * self.kv_heads) * self.head_dim // parallel
        gated = FLOAT_BYTES * 4 * self.intermediate // parallel
        layer = element * (2 * self.hidden + heads) + gated
        return (
            step_tokens * (FLOAT_BYTES * self.hidden + layer) + 2 * FLOAT_BYTES * rows * self.vocab
        )


def size_of_weights(weights: Weights) -> ModelSize:
    """Of a model that the engine can load."""
    shape = weights.shape
    return ModelSize(
        layers=shape.layers,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab=shape.vocab,
        parameters=sum(math.prod(size) for size in tensor_shapes(shape).values()),
        tied_head=shape.tied_head,
        kept=kept(weights),
    )


def size_of_config(path: Path) -> ModelSize:
    """Of any decoder by its Hugging Face config.json. Raises CommandError."""
    try:
        config = json.loads(path.read_bytes())
        return _size(config.get("text_config", config))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise CommandError(f"{path}: not a decoder's config.json ({reason})") from None


def _size(config: dict[str, Any]) -> ModelSize:
    layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
    hidden, vocab = int(config["hidden_size"]), int(config["vocab_size"])
    inner = int(config["intermediate_size"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    latent = int(config.get("kv_lora_rank") or 0)
    if latent:
        latent += int(config["qk_rope_head_dim"])
    if min(layers, heads, hidden, vocab, inner, kv_heads, head_dim) < 1:
        raise ValueError("a size below 1")
    tied = bool(config.get("tie_word_embeddings", False))
    dense = not latent and not any("experts" in name for name in config)
    attention = 2 * hidden * (heads + kv_heads) * head_dim
    parameters = layers * (attention + 3 * hidden * inner) + (1 if tied else 2) * vocab * hidden
    return ModelSize(
        layers=layers,
        hidden=hidden,
        intermediate=inner,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        parameters=parameters if dense else 0,
        tied_head=tied,
        latent_dim=latent,
    )
