"""`python -m tools.bench.chunks MODEL`: each part by itself, then the whole path."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import uvloop

from configs.model.card import load_card
from router.openai.logprobs import TokenTexts
from tools.bench.chunks.encode import costs_us
from tools.bench.chunks.relay import relay
from tools.flags import positive


def main() -> None:
    """Print CPU microseconds per delta; of the whole path also lag and /ready, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="a GGUF file or a safetensors folder")
    parser.add_argument("--streams", type=positive, default=1_000)
    parser.add_argument("--steps", type=positive, default=300, help="deltas of each stream")
    parser.add_argument("--per-s", type=float, default=0.0, help="of each stream; 0 floods")
    parser.add_argument("--parts", action="store_true", help="only the parts")
    options = parser.parse_args()
    card = load_card(options.model)
    for name, cost in costs_us(TokenTexts(card.tokenizer)).items():
        print(f"{name:24} {cost:6.2f} us per delta", flush=True)
    if not options.parts:
        result = uvloop.run(relay(card, options.streams, options.steps, options.per_s))
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
