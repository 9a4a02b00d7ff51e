"""Recording how llama.cpp tokenizes the fixture's hard strings, the oracle of our own tokenizer.

    python -m tools.record_tokenizer MODEL.gguf tests/data/tokenizer_llama_cpp.json

Needs NumPy and the package `xllamacpp`, a build of llama.cpp's server: install both in an
environment of their own. The ids are stored under the model's pre-tokenizer; those of others stay,
so after a change of the strings record every model again.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.model.gguf import GGUFFile


def _server(model: Path) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.warmup = False
    params.n_ctx = 256
    return xllamacpp.Server(params)


def llama_cpp_ids(model: Path, strings: list[str]) -> Iterator[list[int]]:
    """llama.cpp's ids of each string: no BOS, special tokens are not parsed."""
    server = _server(model)
    for text in strings:
        body = {"content": text, "add_special": False, "parse_special": False}
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            yield json.load(reply)["tokens"]


def record(model: Path, fixture: Path) -> None:
    """Write the ids of this model's pre-tokenizer into the fixture."""
    kept = json.loads(fixture.read_text())
    pre = GGUFFile(model).metadata["tokenizer.ggml.pre"]
    kept["ids"][pre] = list(llama_cpp_ids(model, kept["strings"]))
    fixture.write_text(json.dumps(kept, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]), Path(sys.argv[2]))
