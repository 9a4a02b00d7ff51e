"""What a model says of itself: shape, tokenizer, chat template, end tokens, fingerprints.

Both the router and the replicas read it from the same file; equal fingerprints are what lets the
router compute a replica's block keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs.model import folder_tokenizer, gguf_tokenizer
from configs.model.errors import ModelError as ModelError
from configs.model.llama_gguf import GGUFWeights
from configs.model.metadata import Metadata
from configs.model.shape import ModelShape as ModelShape
from configs.model.template import ChatTemplate
from configs.model.text import ModelText
from configs.model.tokenizer import Tokenizer
from configs.model.weights import open_weights


@dataclass(frozen=True, slots=True)
class ModelCard:
    """All of a model but its weights.

    `bos_id` goes before a bare prompt (a chat template writes its own), None where the model wants
    none. `eos_ids` end a text. Fingerprints are hex digests.
    """

    path: Path
    shape: ModelShape
    tokenizer: Tokenizer
    template: ChatTemplate
    bos_id: int | None
    eos_ids: frozenset[int]
    weights_fingerprint: str
    tokenizer_fingerprint: str
    template_fingerprint: str


def load_card(path: Path) -> ModelCard:
    """The card of a GGUF file or of a safetensors folder. Reads every weight once, to hash it.

    Raises ModelError, whose message names the file and the reason.
    """
    weights = open_weights(path)
    vocab = weights.shape.vocab
    try:
        if isinstance(weights, GGUFWeights):
            text = gguf_tokenizer.read_text(Metadata(weights.file.metadata), vocab)
        else:
            text = folder_tokenizer.read_text(path, vocab)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    return _card(path, weights.shape, text, weights.fingerprint())


def _card(path: Path, shape: ModelShape, text: ModelText, weights_fingerprint: str) -> ModelCard:
    return ModelCard(
        path=path,
        shape=shape,
        tokenizer=text.tokenizer,
        template=text.template,
        bos_id=text.bos_id,
        eos_ids=text.eos_ids,
        weights_fingerprint=weights_fingerprint,
        tokenizer_fingerprint=text.tokenizer_fingerprint,
        template_fingerprint=text.template.fingerprint,
    )
