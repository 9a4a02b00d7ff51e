"""Traces in their several forms, and what is wrong with a bad one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.sim.call import TraceError
from tools.sim.traces import read_trace


def write(folder: Path, name: str, *rows: object) -> Path:
    path = folder / name
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def mooncake(at_ms: int, ids: list[int], tokens: int) -> dict[str, object]:
    return {"timestamp": at_ms, "input_length": tokens, "output_length": 5, "hash_ids": ids}


def test_mooncake_rows_of_one_moment_are_spread(tmp_path: Path) -> None:
    rows = [mooncake(at, [0, n], 600) for n, at in enumerate((0, 0, 0, 3_000, 9_000))]
    trace = read_trace(write(tmp_path, "t.jsonl", *rows))
    assert trace.block_tokens == 512
    assert [call.arrival_s for call in trace.calls] == pytest.approx([0.0, 1.0, 2.0, 3.0, 9.0])
    assert [call.blocks.tolist() for call in trace.calls][:2] == [[0, 0], [0, 1]]
    kept = read_trace(tmp_path / "t.jsonl", keep_bins=True)
    assert [call.arrival_s for call in kept.calls] == [0.0, 0.0, 0.0, 3.0, 9.0]
    assert kept.name == "t, bins kept"


def test_run_lengths(tmp_path: Path) -> None:
    row = {"kind": "web", "session": "s", "timestamp": 500, "output_length": 7}
    runs = {**row, "input_length": 100, "hash_runs": [[10, 4], [90, 2]]}
    empty = {**row, "input_length": 0, "hash_runs": []}
    trace = read_trace(write(tmp_path, "t.jsonl", runs, empty))
    (call,) = trace.calls
    assert trace.block_tokens == 16
    assert call.blocks.tolist() == [10, 11, 12, 13, 90, 91]
    assert (call.tenant, call.prompt_tokens, call.output_tokens) == ("web", 100, 7)


def test_lengths_alone_share_nothing(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "azure.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,1000,20",
        "2023-11-16 18:15:48.6805900,400,3",
    )
    trace = read_trace(path)
    first, second = trace.calls
    assert second.arrival_s - first.arrival_s == pytest.approx(2.0)
    assert not set(first.blocks.tolist()) & set(second.blocks.tolist())


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", ":2: not JSON"),
        ("[1]", ":2: not a JSON object"),
        ({"timestamp": 0, "input_length": 5}, ":2: KeyError"),
        (mooncake(0, [1], -5), ":2: lengths out of range"),
        ({**mooncake(0, [1], 5), "hash_ids": ["x"]}, ":2: ValueError"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, says: str) -> None:
    path = write(tmp_path, "t.jsonl", mooncake(0, [1], 5), row)
    with pytest.raises(TraceError, match=says):
        read_trace(path)


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere"):
        read_trace(tmp_path / "nowhere.jsonl")
    with pytest.raises(TraceError, match="no request"):
        read_trace(write(tmp_path, "empty.jsonl"))
