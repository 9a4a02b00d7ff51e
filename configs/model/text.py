"""The text side of a model: tokenizer, chat template and the tokens that begin and end a text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from configs.model.errors import ModelError
from configs.model.template import ChatTemplate
from configs.model.tokenizer import Tokenizer

NO_TEMPLATE = "{{ raise_exception('this model has no chat template') }}"


@dataclass(frozen=True, slots=True)
class ModelText:
    """`bos_id` is None where the model wants nothing before a bare prompt."""

    tokenizer: Tokenizer
    tokenizer_fingerprint: str
    template: ChatTemplate
    bos_id: int | None
    eos_ids: frozenset[int]


def end_ids(candidates: Iterable[int | None], vocab_size: int) -> frozenset[int]:
    """The ids that end a text. Raises ModelError for one outside the vocabulary, or for none."""
    found = frozenset(token for token in candidates if token is not None)
    if not found or not all(0 <= token < vocab_size for token in found):
        raise ModelError(f"the end tokens {sorted(found)} are not ids below {vocab_size}")
    return found


def build_template(
    source: str | None, tokenizer: Tokenizer, variables: Mapping[str, str]
) -> ChatTemplate:
    """The model's template; a model without one refuses every conversation."""
    return ChatTemplate(source or NO_TEMPLATE, tokenizer.specials, variables)
