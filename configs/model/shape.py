"""The shape of a Llama-family model, and the weights that a model of that shape must have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from configs.model.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and constants of one model.

    `arch` is "llama" (SmolLM and Mistral too), "qwen2" or "qwen3". Qwen2 adds biases to q, k and v
    (`qkv_bias`), Qwen3 normalises each head of q and k before the rotation (`qk_norm`). Rotation is
    by halves (rows as Hugging Face orders them), over the whole head, unscaled. With a tied head
    the output projection is the embedding.
    """

    arch: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope_theta: float
    rms_eps: float
    context_tokens: int
    tied_head: bool
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def rope(self) -> str:
        """How positions enter the keys: part of what a KV block is."""
        return f"halves theta={self.rope_theta:g}"

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ModelError(
                f"{self.heads} heads over {self.kv_heads} KV heads of {self.head_dim} don't divide"
            )


def _layer_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    hidden, inner = shape.hidden, shape.intermediate
    q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_rows, hidden),
        "self_attn.k_proj.weight": (kv_rows, hidden),
        "self_attn.v_proj.weight": (kv_rows, hidden),
        "self_attn.o_proj.weight": (hidden, q_rows),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if shape.qkv_bias:
        found["self_attn.q_proj.bias"] = (q_rows,)
        found["self_attn.k_proj.bias"] = found["self_attn.v_proj.bias"] = (kv_rows,)
    if shape.qk_norm:
        found["self_attn.q_norm.weight"] = found["self_attn.k_norm.weight"] = (shape.head_dim,)
    return found


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every weight of the model by its canonical name (as Hugging Face names a Llama's)."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab, shape.hidden),
        "model.norm.weight": (shape.hidden,),
    }
    if not shape.tied_head:
        found["lm_head.weight"] = (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        for name, size in _layer_tensors(shape).items():
            found[f"model.layers.{layer}.{name}"] = size
    return found


def computed_with(name: str) -> tuple[str, ...]:
    """The matrices that are computed as one with this one, itself among them, in their order."""
    for parts in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for part in parts:
            if name.endswith(f".{part}.weight"):
                return tuple(name.replace(part, other) for other in parts)
    return (name,)


def check_tensors(shape: ModelShape, found: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Hold a file's tensors against the shape: all there, none besides, each of the right size.

    A tensor that nothing would read is refused too: leaving it out would change the output.
    """
    given = dict(found)
    if shape.layers > len(given):
        raise ModelError(f"{shape.layers} layers can't be made of {len(given)} tensors")
    wanted = tensor_shapes(shape)
    for problem, names in (("no", wanted.keys() - given), ("unknown", given.keys() - wanted)):
        if names:
            raise ModelError(f"{problem} tensor '{min(names)}' ({len(names)} such) in this model")
    for name, size in wanted.items():
        if given[name] != size:
            raise ModelError(f"tensor '{name}' has shape {given[name]}, not {size}")
