"""The card of a model, from either kind of file, and fingerprints that agree between processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.model.card import ModelShape, load_card
from configs.model.errors import ModelError, TemplateError
from tests.fakes.tiny_folder import write_tiny_folder
from tests.fakes.tiny_model import TEMPLATE, write_tiny_gguf

ROOT = Path(__file__).parents[2]
PRINT_FINGERPRINTS = (
    "import sys; from pathlib import Path; from configs.model.card import load_card;"
    "card = load_card(Path(sys.argv[1]));"
    "print(card.weights_fingerprint, card.tokenizer_fingerprint, card.template_fingerprint);"
    "print('torch' in sys.modules)"
)
CHAT = [
    {"role": "system", "content": "You are the system and the user, 12 345."},
    {"role": "user", "content": "What is in the <|im_end|> and of <|im_start|>?\n\n    é 👍"},
]


def change_json(path: Path, change: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_default_model(real_model: Path) -> None:
    card = load_card(real_model)
    assert card.shape == ModelShape(
        arch="llama",
        layers=30,
        hidden=576,
        intermediate=1_536,
        heads=9,
        kv_heads=3,
        head_dim=64,
        vocab=49_152,
        rope_theta=100_000.0,
        rms_eps=pytest.approx(1e-5),
        context_tokens=8_192,
        tied_head=True,
    )
    assert card.bos_id is None
    assert card.eos_ids == {2}
    assert card.tokenizer.vocab_size == 49_152
    assert card.tokenizer.special_ids == set(range(17))


def test_C1_fingerprints_agree_between_processes(tmp_path: Path, tiny_model: Path) -> None:
    for path in (tiny_model, write_tiny_folder(tmp_path)):
        printed = set()
        for seed in ("0", "1", "4242"):
            command = [sys.executable, "-c", PRINT_FINGERPRINTS, str(path)]
            environ = os.environ | {"PYTHONHASHSEED": seed}
            found = subprocess.run(
                command, env=environ, cwd=ROOT, capture_output=True, text=True, check=True
            )
            printed.add(found.stdout)
        assert len(printed) == 1
        prints, torch_loaded = printed.pop().splitlines()
        card = load_card(path)
        mine = (card.weights_fingerprint, card.tokenizer_fingerprint, card.template_fingerprint)
        assert prints.split() == list(mine)
        assert torch_loaded == "False"


def test_K7_another_revision_has_another_fingerprint(tmp_path: Path, tiny_model: Path) -> None:
    first, other = load_card(tiny_model), load_card(write_tiny_gguf(tmp_path / "b.gguf", seed=1))
    assert first.weights_fingerprint != other.weights_fingerprint
    assert first.tokenizer_fingerprint == other.tokenizer_fingerprint
    assert first.template_fingerprint == other.template_fingerprint


def test_R8_folder_and_gguf_render_the_same_ids(tmp_path: Path, tiny_model: Path) -> None:
    gguf, folder = load_card(tiny_model), load_card(write_tiny_folder(tmp_path))
    ids = [
        card.tokenizer.encode_segments(card.template.render(CHAT, tools=[{"name": "f"}]))
        for card in (gguf, folder)
    ]
    assert ids[0] == ids[1]
    assert gguf.tokenizer.decode(ids[0], skip_special=False) == folder.tokenizer.decode(
        ids[1], skip_special=False
    )


def test_folder_padding_and_ends(tmp_path: Path) -> None:
    card = load_card(write_tiny_folder(tmp_path))
    assert card.eos_ids == {0, 2}
    assert card.bos_id is None
    assert card.tokenizer.vocab_size == card.shape.vocab
    assert card.tokenizer.token_bytes(card.shape.vocab - 1) == b""


def test_folder_bos_by_its_post_processor(tmp_path: Path) -> None:
    write_tiny_folder(tmp_path)
    piece = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    token = {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
    processor = {
        "type": "TemplateProcessing",
        "single": [piece, text],
        "pair": [piece, text],
        "special_tokens": {"<|im_start|>": token},
    }
    change_json(tmp_path / "tokenizer.json", {"post_processor": processor})
    card = load_card(tmp_path)
    assert card.bos_id == 1
    assert card.tokenizer.encode("") == []


def test_folder_template_places(tmp_path: Path) -> None:
    def first_words() -> str:
        segments = load_card(tmp_path).template.render([{"role": "user", "content": "x"}])
        return segments[0].text

    write_tiny_folder(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    change_json(config, {"chat_template": [{"name": "default", "template": "listed"}]})
    assert first_words() == "listed"
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert first_words() == "own file"


def test_a_model_without_template_refuses_chats(tmp_path: Path) -> None:
    write_tiny_folder(tmp_path)
    change_json(tmp_path / "tokenizer_config.json", {"chat_template": None})
    with pytest.raises(TemplateError, match="no chat template"):
        load_card(tmp_path).template.render([{"role": "user", "content": "x"}])


def test_folder_added_tokens_keep_their_ids(tmp_path: Path) -> None:
    write_tiny_folder(tmp_path)
    path = tmp_path / "tokenizer.json"
    spec = json.loads(path.read_text())
    top = load_card(tmp_path).shape.vocab - 1
    row = spec["added_tokens"][0] | {"id": top, "content": "<tool>", "special": False}
    path.write_text(json.dumps(spec | {"added_tokens": [*spec["added_tokens"], row]}))
    tokenizer = load_card(tmp_path).tokenizer
    assert tokenizer.encode("a<tool>b") == [*tokenizer.encode("a"), top, *tokenizer.encode("b")]
    assert tokenizer.decode([top]) == "<tool>"


def test_a_byte_without_a_token_is_left_out_and_joins_nothing(tmp_path: Path) -> None:
    write_tiny_folder(tmp_path)
    path = tmp_path / "tokenizer.json"
    spec = json.loads(path.read_text())
    whole = load_card(tmp_path).tokenizer
    spec["model"]["vocab"]["lost"] = spec["model"]["vocab"].pop("!")
    spec["model"]["unk_token"] = "<|endoftext|>"
    path.write_text(json.dumps(spec))
    tokenizer = load_card(tmp_path).tokenizer
    assert tokenizer.encode("t!he") == whole.encode("t") + whole.encode("he")
    assert len(tokenizer.encode("the")) < len(whole.encode("t!he"))
    assert tokenizer.encode("!") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "WordPiece", "vocab": {}}}, "byte-level BPE"),
        ({"model": 5}, "malformed"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "byte-level BPE"),
        ({"pre_tokenizer": None}, "byte-level BPE"),
        ({"added_tokens": [{"content": "<s>", "id": 1, "lstrip": True}]}, "strip"),
        ({"added_tokens": [{"id": 1}]}, "malformed"),
        ({"added_tokens": [{"content": "x9", "id": 10_000, "special": True}]}, "distinct"),
    ],
)
def test_unsupported_tokenizers_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write_tiny_folder(tmp_path)
    change_json(tmp_path / "tokenizer.json", change)
    with pytest.raises(ModelError, match=message):
        load_card(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
@pytest.mark.parametrize("content", [None, "{", "[]", "\udcff"])
def test_missing_or_broken_files_are_named(tmp_path: Path, name: str, content: str | None) -> None:
    path = write_tiny_folder(tmp_path) / name
    path.unlink()
    if content is not None:
        path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_card(tmp_path)


@settings(max_examples=60)
@given(data=st.data())
def test_damaged_metadata_gives_an_error_or_a_card(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged-card.gguf"
    raw = bytearray(write_tiny_gguf(path, layers=1, hidden=16, heads=2, kv_heads=1).read_bytes())
    end = raw.index(b"token_embd.weight")
    for at in data.draw(st.lists(st.integers(0, end), min_size=1, max_size=3)):
        raw[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
    path.write_bytes(raw)
    with contextlib.suppress(ModelError):
        load_card(path).template.render(CHAT)


def test_neither_file_nor_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing"):
        load_card(tmp_path / "nothing")


def test_template_text_is_the_files_own(tiny_model: Path) -> None:
    assert "<|im_start|>" in TEMPLATE
    segments = load_card(tiny_model).template.render(CHAT)
    assert [each.special_id for each in segments if each.special_id is not None] == [1, 2, 1, 2, 1]
