"""Reading traces: Mooncake's form, its run-length form, and lengths alone.

- Mooncake (FAST'25 release): JSON lines of `timestamp` (ms), `input_length`, `output_length` and
  `hash_ids`, one for each block of 512 tokens; an equal id means an equal prefix.
- Run-length: the same with `hash_runs`, pairs of first id and count, `session` and `kind`;
  timestamps count from the start of their kind. Blocks have 16 tokens.
- Azure's public traces: CSV of TIMESTAMP, ContextTokens, GeneratedTokens; nothing is shared.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from itertools import count, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tools.sim.call import Call, Trace, TraceError

MOONCAKE_BLOCK_TOKENS = 512
RUN_LENGTH_BLOCK_TOKENS = 16
MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_TOKENS = 4_000_000
MAX_BIN_S = 3.0
ANYBODY = "trace"


def read_trace(path: Path, keep_bins: bool = False) -> Trace:
    """The trace in a file, its form told by its content. Raises TraceError.

    `keep_bins`: what was recorded at one moment comes at one moment."""
    try:
        with path.open(encoding="utf-8") as file:
            calls, block_tokens = _read(path, file)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', error)}") from error
    if not calls:
        raise TraceError(f"{path}: no request in it has a prompt")
    calls.sort(key=lambda call: call.arrival_s)
    if keep_bins:
        return Trace(f"{path.stem}, bins kept", block_tokens, tuple(calls))
    return Trace(path.stem, block_tokens, tuple(_spread(calls)))


def _spread(calls: list[Call]) -> Iterator[Call]:
    """Recordings in bins (Mooncake's of 3 s) bring whole crowds at once: those of one moment are
    spread evenly up to the next one."""
    times = sorted({call.arrival_s for call in calls})
    until = dict(pairwise(times))
    for at_s, group in groupby(calls, key=lambda call: call.arrival_s):
        same = list(group)
        gap_s = min(MAX_BIN_S, until.get(at_s, at_s) - at_s) / len(same)
        for place, call in enumerate(same):
            yield replace(call, arrival_s=at_s + place * gap_s) if place else call


def _read(path: Path, file: Iterable[str]) -> tuple[list[Call], int]:
    if path.suffix == ".csv":
        return list(_lengths(path, file)), MOONCAKE_BLOCK_TOKENS
    rows = _rows(path, file)
    first = next(rows, None)
    if first is None:
        return [], MOONCAKE_BLOCK_TOKENS
    runs = "hash_runs" in first[1]
    block_tokens = RUN_LENGTH_BLOCK_TOKENS if runs else MOONCAKE_BLOCK_TOKENS
    read = _run_length if runs else _mooncake
    return [call for row in (first, *rows) if (call := _typed(path, *row, read))], block_tokens


def _rows(path: Path, file: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(file, 1):
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(f"{path}:{number}: the line is too long")
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise TraceError(f"{path}:{number}: not JSON") from None
        if not isinstance(row, dict):
            raise TraceError(f"{path}:{number}: not a JSON object")
        yield number, row


def _typed(
    path: Path, number: int, row: dict[str, Any], read: Callable[[dict[str, Any]], Call]
) -> Call | None:
    """The row's call; None for one without a prompt, which loads nobody."""
    try:
        if row["input_length"] == 0:
            return None
        call = read(row)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"{path}:{number}: {type(error).__name__}: {error}") from None
    if not 0 < call.prompt_tokens <= MAX_TOKENS or not 0 <= call.output_tokens <= MAX_TOKENS:
        raise TraceError(f"{path}:{number}: lengths out of range")
    return call


def _mooncake(row: dict[str, Any]) -> Call:
    return _call(row, np.array(row["hash_ids"], np.int64), ANYBODY, MOONCAKE_BLOCK_TOKENS)


def _run_length(row: dict[str, Any]) -> Call:
    runs = [np.arange(first, first + length) for first, length in row["hash_runs"]]
    blocks = np.concatenate(runs) if runs else np.empty(0, np.int64)
    return _call(row, blocks, str(row["kind"]), RUN_LENGTH_BLOCK_TOKENS)


def _call(row: dict[str, Any], blocks: np.ndarray, tenant: str, block_tokens: int) -> Call:
    prompt_tokens = int(row["input_length"])
    if len(blocks) != -(-prompt_tokens // block_tokens):
        # Some recordings leave the partial block out; what has no id is nobody else's.
        blocks = blocks[: prompt_tokens // block_tokens]
    return Call(
        arrival_s=float(row["timestamp"]) / 1e3,
        tenant=tenant,
        blocks=blocks,
        prompt_tokens=prompt_tokens,
        output_tokens=int(row["output_length"]),
    )


def _lengths(path: Path, file: Iterable[str]) -> Iterator[Call]:
    """Every prompt is its own: ids below zero occur in no other trace."""
    own, start_s = count(1), None
    for number, row in enumerate(csv.DictReader(file), 2):
        try:
            at_s = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
            prompt_tokens, output_tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}:{number}: {type(error).__name__}: {error}") from None
        start_s = at_s if start_s is None else start_s
        if 0 < prompt_tokens <= MAX_TOKENS and 0 <= output_tokens <= MAX_TOKENS:
            blocks = -(-prompt_tokens // MOONCAKE_BLOCK_TOKENS)
            ids = np.array([-next(own) for _ in range(blocks)], np.int64)
            yield Call(at_s - start_s, ANYBODY, ids, prompt_tokens, output_tokens)
