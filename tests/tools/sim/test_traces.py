"""Traces in their several forms, and what is wrong with a bad one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.sim.call import TraceError
from tools.sim.prompt import prompt_ids
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
    rows = [mooncake(at, [0, n], 600) for n, at in enumerate((0, 0, 0, 3_000, 9_000, 9_000))]
    trace = read_trace(write(tmp_path, "t.jsonl", *rows))
    assert trace.block_tokens == 512
    assert [call.arrival_s for call in trace.calls] == pytest.approx(
        [0.0, 1.0, 2.0, 3.0, 9.0, 10.5]
    )
    assert [call.blocks.tolist() for call in trace.calls][:2] == [[0, 0], [0, 1]]
    kept = read_trace(tmp_path / "t.jsonl", keep_bins=True)
    assert [call.arrival_s for call in kept.calls] == [0.0, 0.0, 0.0, 3.0, 9.0, 9.0]
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
        ({**mooncake(0, [1], 5), "hash_ids": [1.5]}, ":2: ValueError"),
        ({**mooncake(0, [1], 5), "hash_ids": [[1, 2], [3, 4]]}, ":2: ValueError"),
        ({**mooncake(0, [1], 5), "input_length": 5.5}, ":2: ValueError"),
        (
            '{"timestamp": NaN, "input_length": 5, "output_length": 5, "hash_ids": [1]}',
            ":2: no time",
        ),
        ("[" * 100_000, ":2: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, says: str) -> None:
    path = write(tmp_path, "t.jsonl", mooncake(0, [1], 5), row)
    with pytest.raises(TraceError, match=says):
        read_trace(path)


@pytest.mark.parametrize("runs", [[[1, -10]], [[1, 10**12]], [[1, 2, 3]], [[1, 2.5]]])
def test_a_bad_run_is_named(tmp_path: Path, runs: list[list[float]]) -> None:
    row = {"kind": "web", "timestamp": 0, "input_length": 320, "output_length": 1}
    with pytest.raises(TraceError, match=":1: ValueError"):
        read_trace(write(tmp_path, "t.jsonl", {**row, "hash_runs": runs}))


def test_lengths_out_of_range_are_no_request_left_out(tmp_path: Path) -> None:
    head, day = "TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46"
    assert len(read_trace(write(tmp_path, "a.csv", head, f"{day},0,9", f"{day},9,9")).calls) == 1
    with pytest.raises(TraceError, match=":3: lengths out of range"):
        read_trace(write(tmp_path, "a.csv", head, f"{day},9,9", f"{day},9,9999999"))


def test_blocks_without_an_id_are_nobody_elses(tmp_path: Path) -> None:
    rows = [mooncake(at, [7], 512 * 4) for at in (0, 1_000)]
    trace = read_trace(write(tmp_path, "t.jsonl", *rows, mooncake(2_000, [], 100)))
    first, second, third = (call.blocks.tolist() for call in trace.calls)
    assert (first[0], len(first), len(second), len(third)) == (7, 4, 4, 1)
    assert set(first) & set(second) == {7}
    assert not {*first, *second} & set(third)


def test_wide_ids_stay_apart_and_equal_ones_equal(tmp_path: Path) -> None:
    rows = [mooncake(n, [2**63 + 5, n << 32], 1_024) for n in (1, 2, 1)]
    trace = read_trace(write(tmp_path, "t.jsonl", *rows))
    tokens = [prompt_ids(call, trace.block_tokens).tolist() for call in trace.calls]
    assert tokens.count(tokens[0]) == 2
    assert len({tuple(of) for of in tokens}) == 2
    assert len({tuple(of[:512]) for of in tokens}) == 1


def test_a_byte_order_mark_is_no_part_of_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(mooncake(0, [1], 5)), encoding="utf-8-sig")
    assert len(read_trace(path).calls) == 1


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere"):
        read_trace(tmp_path / "nowhere.jsonl")
    with pytest.raises(TraceError, match="no request"):
        read_trace(write(tmp_path, "empty.jsonl"))
