"""The commands of `warmroute`. Each lives in its own file and is imported when called."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from configs.load import ConfigError
from configs.model.errors import ModelError
from tools.errors import CommandError
from tools.fetch import FetchError

COMMANDS = {
    "up": ("tools.up", "start nats-server, replicas and the gateway on this machine"),
    "warm": ("tools.warm", "make prompts warm on k replicas, and prove it"),
    "explain": ("tools.explain", "say where a prompt would go and why; nothing is sent"),
    "doctor": ("tools.doctor.command", "say what this set-up lacks, or what a replica can hold"),
    "kv": ("tools.kv.command", "what the host's shared KV memory holds; check it, empty it"),
    "bridge": ("tools.bridge.command", "tell the routers what a vLLM or SGLang server has cached"),
    "sim": ("tools.sim.command", "replay a trace over simulated replicas, policy by policy"),
    "bench": ("tools.bench.cli", "measure what routing gains here, and the engine alone"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warmroute",
        description="An OpenAI gateway that sends each request where its prompt is warm.",
        epilog="`warmroute COMMAND --help` lists the flags of a command.",
    )
    version = importlib.metadata.version("warmroute")
    parser.add_argument("--version", action="version", version=f"warmroute {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def run(words: Sequence[str]) -> int:
    """Run one command; returns the exit status."""
    chosen = _parser().parse_args(words[:1])
    try:
        module = importlib.import_module(COMMANDS[chosen.command][0])
        return int(module.main(words[1:]) or 0)
    except (CommandError, ConfigError, FetchError, ModelError) as error:
        print(f"warmroute {chosen.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read the output has left (`| head`): nothing more can be said, nor flushed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
