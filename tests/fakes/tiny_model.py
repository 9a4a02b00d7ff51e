"""A random Llama-family model small enough to run in milliseconds, with a tokenizer of its own."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np

from tests.fakes.gguf_writer import Tensor, Value, q4_1, q8_0, write_gguf

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (
    "h e", "Ġ t", "Ġt he", "i n", "e r", "a n", "r e", "o n", "Ġ a", "o u", "Ġ w", "l l", "s t",
    "Ġ s", "in g", "e n", "Ġ o", "Ġo f", "an d", "Ġ and", "Ġ in", "Ġ c", "a t", "i s", "Ġ is",
    "s y", "sy st", "syst e", "syste m", "u s", "us er", "as s", "a s", "ass is", "assis t",
    "assist an", "assistan t", "Ġ Ġ", "ĠĠ ĠĠ", "Ċ Ċ",
)  # fmt: skip
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are tiny.<|im_end|>\n' }}{% endif %}"
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary."""
    plain = set(chain(range(33, 127), range(161, 173), range(174, 256)))
    spare = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


def vocabulary() -> list[str]:
    """Specials, the 256 bytes, then what the merges make."""
    return [*SPECIALS, *byte_letters(), *(pair.replace(" ", "") for pair in MERGES)]


def _metadata(
    layers: int, hidden: int, heads: int, kv_heads: int, context: int
) -> dict[str, Value]:
    tokens = vocabulary()
    return {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.block_count": layers,
        "llama.context_length": context,
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": 2 * hidden,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.rope.freq_base": 10_000.0,
        "llama.rope.dimension_count": hidden // heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def _tensors(
    layers: int, hidden: int, heads: int, kv_heads: int, seed: int
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    kv_rows = hidden // heads * kv_heads

    def matrix(rows: int, columns: int) -> np.ndarray:
        # A gain above one keeps the layers, not the embedding, in charge of the logits.
        return (rng.standard_normal((rows, columns)) * 2 / columns**0.5).astype(np.float16)

    def norm() -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(hidden)).astype(np.float32)

    found = {"token_embd.weight": matrix(len(vocabulary()), hidden), "output_norm.weight": norm()}
    for layer in range(layers):
        found |= {
            f"blk.{layer}.{name}.weight": array
            for name, array in {
                "attn_norm": norm(),
                "attn_q": matrix(hidden, hidden),
                "attn_k": matrix(kv_rows, hidden),
                "attn_v": matrix(kv_rows, hidden),
                "attn_output": matrix(hidden, hidden),
                "ffn_norm": norm(),
                "ffn_gate": matrix(2 * hidden, hidden),
                "ffn_up": matrix(2 * hidden, hidden),
                "ffn_down": matrix(hidden, 2 * hidden),
            }.items()
        }
    return found


def write_tiny_gguf(
    path: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 2048,
    seed: int = 0,
    q4: bool = False,
) -> Path:
    """A random Llama-family GGUF at `path`; equal arguments give equal bytes. With `q4` its
    matrices are Q4_1 blocks, its embedding Q8_0."""
    metadata = _metadata(layers, hidden, heads, kv_heads, context)
    tensors: dict[str, Tensor] = dict(_tensors(layers, hidden, heads, kv_heads, seed))
    if q4:
        for name, array in tensors.items():
            if len(array.shape) == 2:
                tensors[name] = (q8_0 if name == "token_embd.weight" else q4_1)(array)
    return write_gguf(path, metadata, tensors)
