"""A quicker encoder where one is installed and gives the very ids of the library's own.

`fastokens` encodes three to eight times as fast. It is held against the library when it is made,
and once in a while later: the first difference puts it out of use for good.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

Encode = Callable[[str], list[int]]

CHECK_EVERY = 512
_NO_LETTER = chr(0x10FFFD)
"""Stands for no byte, so no text can spell a token that holds it."""

_PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "it's we're I'd YOU'LL they've 'tis don'T \t's 'ſ",
    "def f(x):\n\treturn  x**2 + 1e-9  # x²\r\n\r\n   \n\n  end ",
    "0 12 345 6789 3.14159 1,000,000 ½ Ⅷ ٣٤ 二",
    "café cafe\u0301 naïve Ångström ǅ ﬁ ẞ",
    "Привет κόσμε مرحبا שלום नमस्ते 你好，世界。こんにちは 안녕 สวัสดี",
    "👨\u200d👩\u200d👧 🇩🇪 ❤\ufe0f \u200b\u00a0\u2003\u3000|",
    "<|im_start|>user\n</s> [INST] <unk> {{ x }} \\n %20 &amp; https://a.b/c?d=e#f",
    "".join(map(chr, range(0x250))),
    "a" * 300 + " " * 300 + "\n" * 50 + "!?" * 100,
    "\x00\x01\x7f\x80\ufffe\U0010fffd",
)


def quick_encoder(spec: Mapping[str, Any], oracle: Encode) -> Encode:
    """The quick encoder of a tokenizer.json, checked now and then; else `oracle` itself."""
    try:
        from fastokens import Tokenizer as Backend

        backend = Backend.from_json_str(json.dumps(_without_gaps(spec)))
        if all(backend.encode(text).ids == oracle(text) for text in _PROBES):
            return Checked(lambda text: list(backend.encode(text).ids), oracle)
    except ImportError:
        return oracle
    except Exception as error:  # the library raises whatever it likes
        log.warning("fastokens does not take this tokenizer (%s)", type(error).__name__)
        return oracle
    log.warning("fastokens gives other ids for this tokenizer: it is not used")
    return oracle


def _without_gaps(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The library wants a token for each id; the special ones were taken out."""
    vocab = spec["model"]["vocab"]
    ids = set(vocab.values()) | {row["id"] for row in spec.get("added_tokens") or ()}
    gaps = {f"{_NO_LETTER}{token}": token for token in range(max(ids)) if token not in ids}
    return {**spec, "model": {**spec["model"], "vocab": {**vocab, **gaps}}}


class Checked:
    """`quick`, of which every so many texts are encoded by `oracle` too."""

    def __init__(self, quick: Encode, oracle: Encode) -> None:
        self.trusted = True
        self._quick = quick
        self._oracle = oracle
        self._left = CHECK_EVERY

    def __call__(self, text: str) -> list[int]:
        """Ids of `text`."""
        if not self.trusted:
            return self._oracle(text)
        self._left -= 1
        if self._left > 0:
            return self._quick(text)
        self._left = CHECK_EVERY
        return self._compared(text)

    def _compared(self, text: str) -> list[int]:
        ids = self._oracle(text)
        if self._quick(text) != ids:
            self.trusted = False
            log.error("fastokens gave other ids than the tokenizer: it is out of use from now on")
        return ids
