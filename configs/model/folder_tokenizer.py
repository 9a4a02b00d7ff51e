"""Tokenizer and chat template from a folder as Hugging Face lays it out."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from configs.model.errors import ModelError
from configs.model.safetensors import read_json
from configs.model.text import ModelText, build_template, end_ids
from configs.model.tokenizer import Tokenizer, with_all_bytes

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class _Parts:
    """A tokenizer.json taken apart. `plain` is it less its special tokens and less what it puts
    around a text; the rest maps spelling to id."""

    plain: dict[str, Any]
    normal: dict[str, int]
    special: dict[str, int]
    added: dict[str, int]


def _parts(spec: dict[str, Any], vocab_size: int) -> _Parts:
    rows = spec.get("added_tokens") or []
    if any(row.get("lstrip") or row.get("rstrip") for row in rows):
        raise ModelError("added tokens that strip the text beside them are not supported")
    special = {row["content"]: row["id"] for row in rows if row["special"]}
    added = {row["content"]: row["id"] for row in rows if not row["special"]}
    model = spec["model"]
    apart = special.keys() | added
    normal = {text: token for text, token in model["vocab"].items() if text not in apart}
    known = with_all_bytes(normal, vocab_size) | added
    pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"])
    merges = [[left, right] for left, right in pairs if {left, right, left + right} <= known.keys()]
    plain = spec | {
        # Added tokens stand in the vocabulary too, which keeps the library from renumbering them.
        "model": model | {"vocab": known, "merges": merges, "unk_token": None},
        "added_tokens": [row for row in rows if not row["special"]],
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    return _Parts(plain, normal, special, added)


def _byte_level(part: Any) -> bool:
    """Whether a pre-tokenizer or decoder is byte-level, by itself or in a sequence."""
    if not isinstance(part, dict):
        return False
    inner = [*part.get("pretokenizers", ()), *part.get("decoders", ())]
    return part.get("type") == "ByteLevel" or any(map(_byte_level, inner))


def build_tokenizer(raw: str, vocab_size: int) -> Tokenizer:
    """The tokenizer that a tokenizer.json describes. Raises ModelError where it's not supported."""
    try:
        spec = json.loads(raw)
        if spec["model"].get("type", "BPE") != "BPE" or not _byte_level(spec["pre_tokenizer"]):
            raise ModelError("only byte-level BPE tokenizers are supported")
        parts = _parts(spec, vocab_size)
        backend = Backend.from_str(json.dumps(parts.plain))
        return Tokenizer(backend, parts.normal, parts.special, parts.added, vocab_size)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"tokenizer.json is malformed: {error!r:.200}") from error


def _spelling(value: Any) -> str | None:
    """A named token is a string, or an object with its content."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """The template's own file, else the config's, of several the one named default."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {each.get("name"): each.get("template") for each in source}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _ends(folder: Path, named: int | None) -> list[int | None]:
    """End tokens by the generation settings, the model's settings and the tokenizer's."""
    found: list[int | None] = [named]
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id") if (folder / name).exists() else None
        values = value if isinstance(value, list) else [value]
        found += [each for each in values if type(each) is int]
    return found


def _bos(raw: str, bos: int | None) -> int | None:
    """The BOS token, where the tokenizer's own post-processing puts it before a text."""
    before: list[int] = Backend.from_str(raw).encode("").ids
    return bos if before[:1] == [bos] else None


def read_text(folder: Path, vocab_size: int) -> ModelText:
    """The text side of the model in `folder`. Raises ModelError."""
    config = read_json(folder / "tokenizer_config.json")
    try:
        raw = (folder / "tokenizer.json").read_text(encoding="utf-8")
        source = _template_source(folder, config)
    except (OSError, ValueError) as error:
        raise ModelError(str(error)) from error
    tokenizer = build_tokenizer(raw, vocab_size)
    spellings = {name: _spelling(config.get(name)) for name in _NAMED}
    variables = {name: text for name, text in spellings.items() if text is not None}
    ids = {name: tokenizer.specials.get(text) for name, text in variables.items()}
    return ModelText(
        tokenizer=tokenizer,
        tokenizer_fingerprint=hashlib.sha256(b"wr-tokenizer-json-1" + raw.encode()).hexdigest(),
        template=build_template(source, tokenizer, variables),
        bos_id=_bos(raw, ids.get("bos_token")),
        eos_ids=end_ids(_ends(folder, ids.get("eos_token")), vocab_size),
    )
