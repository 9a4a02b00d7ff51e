"""What one delta costs the router: each part by itself, then from the link's frame to the sockets.

Everything is this process's CPU time. A plain send of as many bytes, measured in the same run, is
the floor: what is above it is ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from configs.model.card import load_card
from router.openai.logprobs import TokenTexts
from tools.bench.chunks.encode import costs_us
from tools.bench.chunks.relay import relay
from tools.fetch import default_model
from tools.flags import output_file, positive


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="warmroute bench chunks", description=__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the default model)")
    parser.add_argument("--streams", type=positive, default=1_000, help="open at once")
    parser.add_argument("--steps", type=positive, default=100, help="deltas of each stream")
    parser.add_argument("--per-s", type=float, default=10.0, help="of each stream; 0 floods")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures here")
    flags = parser.parse_args(arguments)
    card = load_card(flags.model or default_model())
    found = {f"{name}_us": cost for name, cost in costs_us(TokenTexts(card.tokenizer)).items()}
    found |= uvloop.run(relay(card, flags.streams, flags.steps, flags.per_s))
    for name, value in found.items():
        print(f"{name:28} {value:10.2f}")
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
