"""Kinds of flags that several commands take: refused at once, before anything is started."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

PORT_MAX = 65_535
OWN_TIMES = "trace"
MIN_BYTES = 1 << 20


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes a whole number, not '{text}'") from None


def positive(text: str) -> int:
    """An integer from 1 on."""
    number = _integer(text)
    if number < 1:
        raise argparse.ArgumentTypeError("takes 1 or more")
    return number


def factor(text: str) -> float:
    """A number above zero."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("takes a number above 0")
    return number


def amount(text: str) -> float:
    """A number from zero on."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError("takes a number from 0 on")
    return number


def share(text: str) -> float:
    """A part of the whole."""
    number = amount(text)
    if number > 1:
        raise argparse.ArgumentTypeError("takes 0 to 1")
    return number


def pace(text: str) -> float | None:
    """A load as a factor, or None for the trace's own times."""
    return None if text == OWN_TIMES else factor(text)


def add_keep_bins(parser: argparse._ActionsContainer) -> None:
    """`keep_bins`, as read_trace takes it."""
    parser.add_argument(
        "--keep-bins",
        action="store_true",
        help="what a file recorded at one moment comes at one moment; else it is spread evenly "
        "up to the next one, over 3 s at most",
    )


def natural(text: str) -> int:
    """An integer from 0 on."""
    number = _integer(text)
    if number < 0:
        raise argparse.ArgumentTypeError("takes 0 or more")
    return number


def port(text: str) -> int:
    """A TCP port; 0 means any free one."""
    number = _integer(text)
    if not 0 <= number <= PORT_MAX:
        raise argparse.ArgumentTypeError(f"takes 0 to {PORT_MAX}")
    return number


def device(text: str) -> str:
    """Where a replica computes, as torch names it."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"takes cpu, cuda or cuda:N, not '{text}'")
    return text


def memory_bytes(text: str) -> int:
    """A size that can hold anything."""
    number = positive(text)
    if number < MIN_BYTES:
        raise argparse.ArgumentTypeError(f"takes bytes, {MIN_BYTES} or more")
    return number


def output_file(text: str) -> Path:
    """A file that can be written: nobody measures for a minute and then loses the figures."""
    path = Path(text)
    there = path.exists()
    try:
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"can't write {text}: {error.strerror}") from None
    return path


def picture_file(text: str) -> Path:
    """An output file whose name says a format that can be drawn."""
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError("takes a name that ends in .png, .svg or .pdf")
    return output_file(text)


def policy_names(text: str) -> tuple[str, ...]:
    """Known routing policies, comma-separated, each once."""
    from router.policies import POLICIES

    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in POLICIES]:
        known = ", ".join(sorted(POLICIES))
        raise argparse.ArgumentTypeError(f"unknown policy '{unknown[0]}'; known: {known}")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError("names a policy twice")
    return names
