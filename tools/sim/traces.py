"""Reading traces: Mooncake's form, its run-length form, and lengths alone.

- Mooncake (FAST'25 release): JSON lines of `timestamp` (ms), `input_length`, `output_length` and
  `hash_ids`, one for each block of 512 tokens; an equal id means an equal prefix.
- Run-length: the same with `hash_runs`, pairs of first id and count, `session` and `kind`;
  timestamps count from the start of their kind. Blocks have 16 tokens.
- Azure's public traces: CSV of TIMESTAMP, ContextTokens, GeneratedTokens; nothing is shared.

A block without an id is nobody else's.
"""

from __future__ import annotations

import csv
import json
import math
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
MAX_ID = 2**31 - 1
MAX_BIN_S = 3.0
ANYBODY = "trace"


def read_trace(path: Path, keep_bins: bool = False) -> Trace:
    """The trace in a file, its form told by its content. Raises TraceError.

    `keep_bins`: what was recorded at one moment comes at one moment."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            told, block_tokens = _read(path, file)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', error)}") from error
    if not told:
        raise TraceError(f"{path}: no request in it has a prompt")
    calls = list(_completed(told, block_tokens))
    calls.sort(key=lambda call: call.arrival_s)
    if keep_bins:
        return Trace(f"{path.stem}, bins kept", block_tokens, tuple(calls))
    return Trace(path.stem, block_tokens, tuple(_spread(calls)))


def _spread(calls: list[Call]) -> Iterator[Call]:
    """Recordings in bins (Mooncake's of 3 s) bring whole crowds at once: those of one moment are
    spread evenly up to the next one, those of the last for as long as those before."""
    times = sorted({call.arrival_s for call in calls})
    until = dict(pairwise(times))
    until[times[-1]] = times[-1] + (times[-1] - times[-2] if len(times) > 1 else 0.0)
    for at_s, group in groupby(calls, key=lambda call: call.arrival_s):
        same = list(group)
        gap_s = min(MAX_BIN_S, until[at_s] - at_s) / len(same)
        for place, call in enumerate(same):
            yield replace(call, arrival_s=at_s + place * gap_s) if place else call


def _completed(calls: list[Call], block_tokens: int) -> Iterator[Call]:
    """With ids that a token can be, equal where those in the file are, and an id of its own (below
    zero) for each block that has none."""
    ids = np.concatenate([call.blocks for call in calls])
    if ids.size and not 0 <= ids.min() <= ids.max() <= MAX_ID:
        ids = np.unique(ids, return_inverse=True)[1]
    own, at = count(1), 0
    for call in calls:
        blocks = ids[at : at + len(call.blocks)]
        at += len(blocks)
        # A partial block can't be found in a cache: it needs no id where others have one.
        if len(blocks) < max(1, call.prompt_tokens // block_tokens):
            lacking = -(-call.prompt_tokens // block_tokens) - len(blocks)
            fresh = np.array([-next(own) for _ in range(lacking)], np.int64)
            blocks = np.concatenate((blocks, fresh))
        yield replace(call, blocks=blocks)


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
        except (ValueError, RecursionError):
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
    return _in_range(path, number, call)


def _in_range(path: Path, number: int, call: Call) -> Call:
    if not 0 < call.prompt_tokens <= MAX_TOKENS or not 0 <= call.output_tokens <= MAX_TOKENS:
        raise TraceError(f"{path}:{number}: lengths out of range")
    if not math.isfinite(call.arrival_s):
        raise TraceError(f"{path}:{number}: no time at which it could come")
    return call


def _mooncake(row: dict[str, Any]) -> Call:
    ids = row["hash_ids"]
    if any(type(each) is not int for each in ids):
        raise ValueError("hash_ids has to be a list of whole numbers")
    blocks = np.array([each % 2**64 for each in ids], np.uint64).astype(np.int64)
    return _call(row, blocks, ANYBODY, MOONCAKE_BLOCK_TOKENS)


def _run_length(row: dict[str, Any]) -> Call:
    told = [(_whole(first), _whole(length)) for first, length in row["hash_runs"]]
    if any(length < 1 for _, length in told) or sum(length for _, length in told) > MAX_TOKENS:
        raise ValueError("hash_runs out of range")
    runs = [np.arange(first, first + length, dtype=np.int64) for first, length in told]
    blocks = np.concatenate(runs) if runs else np.empty(0, np.int64)
    return _call(row, blocks, str(row["kind"]), RUN_LENGTH_BLOCK_TOKENS)


def _call(row: dict[str, Any], blocks: np.ndarray, tenant: str, block_tokens: int) -> Call:
    prompt_tokens = _whole(row["input_length"])
    if len(blocks) != -(-prompt_tokens // block_tokens):
        # Some recordings leave the partial block out.
        blocks = blocks[: prompt_tokens // block_tokens]
    return Call(
        arrival_s=float(row["timestamp"]) / 1e3,
        tenant=tenant,
        blocks=blocks,
        prompt_tokens=prompt_tokens,
        output_tokens=_whole(row["output_length"]),
    )


def _whole(value: Any) -> int:
    if isinstance(value, bool) or int(value) != float(value):
        raise ValueError(f"{value!r} is no whole number")
    return int(value)


def _lengths(path: Path, file: Iterable[str]) -> Iterator[Call]:
    """No block has an id: every prompt is its own."""
    start_s, nothing = None, np.empty(0, np.int64)
    for number, row in enumerate(csv.DictReader(file), 2):
        try:
            at_s = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
            prompt_tokens, output_tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}:{number}: {type(error).__name__}: {error}") from None
        start_s = at_s if start_s is None else start_s
        if prompt_tokens:
            call = Call(at_s - start_s, ANYBODY, nothing, prompt_tokens, output_tokens)
            yield _in_range(path, number, call)
