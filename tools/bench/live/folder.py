"""A model as other projects read it: a Hugging Face folder, from the file that ours reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configs.model.card import ModelCard, load_card
from tools.bench.engine.export import config_of, write_weights


def write_model(model: Path, folder: Path, *, weights: bool) -> Path:
    """Tokenizer, chat template and shape, for those who compute the weights too; returns the
    folder. Raises ModelError."""
    card = load_card(model)
    folder.mkdir()
    ends = {"bos_token_id": card.bos_id, "eos_token_id": sorted(card.eos_ids)}
    texts = {
        "tokenizer.json": _tokenizer(card),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": card.template.source,
            **card.template.variables,
        },
        "config.json": config_of(card.shape) | ends,
        "generation_config.json": ends,
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content))
    if weights:
        write_weights(model, folder)
    return folder


def _tokenizer(card: ModelCard) -> dict[str, Any]:
    """As the library writes it, with the special tokens that ours is built without."""
    spec = card.tokenizer.spec()
    spec["model"]["vocab"] |= card.tokenizer.specials
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec["added_tokens"] += [
        {"id": token, "content": spelling, "special": True, **plain}
        for spelling, token in card.tokenizer.specials.items()
    ]
    spec["added_tokens"].sort(key=lambda row: row["id"])
    spec["decoder"] = {
        "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True
    }  # fmt: skip
    return spec
