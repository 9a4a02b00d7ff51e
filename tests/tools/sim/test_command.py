"""The command: what it prints and writes, and what it refuses before it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.errors import CommandError
from tools.sim.command import main

SMALL = "groups:groups=4,system=600,question=200,output=20,rates=4,stage_s=5"


def test_figures_and_settings_are_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "sim.json"
    flags = ["--replicas", "2", "--slow", "r0=0.5", "--muted", "r1", "--fault", "2:restart:r0"]
    assert main([SMALL, *flags, "--fault", "3:router", "--load", "trace", "--json", str(file)]) == 0
    told = capsys.readouterr()
    assert "warmroute" in told.out
    assert told.err == "warmroute: policy 1 of 1\n"
    result = json.loads(file.read_text())
    figures = result["policies"]["warmroute"]
    wanted = {"cached_token_ratio", "ttft_mean_s", "ttft_p90_s", "ttft_p99_s", "max_over_mean_load"}
    assert wanted <= figures.keys()
    assert figures["requests"] == result["settings"]["requests"]
    assert len(figures["ttft_percentiles_s"]) == 101
    assert figures["replicas"].keys() == {"r0", "r1"}
    assert result["settings"]["speeds"] == {"r0": 0.5}
    assert result["settings"]["faults"] == ["2:restart:r0", "3:router"]
    assert result["settings"]["load"] is None


@pytest.mark.slow
def test_another_process_writes_the_same_bytes(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("1.json", "2.json")]
    for seed, file in enumerate(files, 1):
        command = [sys.executable, "-m", "tools.cli", "sim", SMALL, "--replicas", "3"]
        environ = {**os.environ, "PYTHONHASHSEED": str(seed)}
        flags = ["--policy", "all", "--jitter-ms", "80", "--loss", "0.1", "--json", str(file)]
        subprocess.run([*command, *flags], env=environ, check=True, stdout=subprocess.DEVNULL)
    first, second = (file.read_bytes() for file in files)
    assert first == second


@pytest.mark.slow
def test_capacity_is_found_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    json_file, plot = tmp_path / "sim.json", tmp_path / "sim.png"
    flags = ["--replicas", "1", "--capacity-slo-s", "0.2", "--json", str(json_file)]
    assert main([SMALL, *flags, "--plot", str(plot)]) == 0
    figures = json.loads(json_file.read_text())["policies"]["warmroute"]
    curve = dict(map(tuple, figures["capacity_curve"]))
    assert curve[figures["capacity_load"]] <= 0.2
    assert plot.read_bytes().startswith(b"\x89PNG")
    heading = next(line for line in capsys.readouterr().out.splitlines() if "policy" in line)
    assert heading.split()[-1] == "capacity"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["groups:x=1"], "unknown setting 'x'"),
        ([SMALL, "--replicas", "2", "--slow", "r2=0.5"], "no replica 'r2': they are r0, r1"),
        ([SMALL, "--replicas", "1", "--fault", "1:die:r0"], "nobody would answer"),
        ([SMALL, "--replicas", "0"], "some replicas have to answer"),
    ],
)
def test_what_cannot_be_simulated_is_told(flags: list[str], says: str) -> None:
    with pytest.raises(CommandError, match=says):
        main(flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--slow", "r0"],
        ["--slow", "r0=0"],
        ["--fault", "30"],
        ["--fault", "30:explode:r0"],
        ["--fault", "30:router:r0"],
        ["--fault", "30:die"],
        ["--fault", "x:die:r0"],
        ["--load", "0"],
        ["--policy", "best"],
        *([flag, bad] for flag in ("--lag-ms", "--jitter-ms", "--loss") for bad in ("nan", "-1")),
        ["--loss", "1.1"],
        ["--itl-target-ms", "nan"],
        ["--json", "/proc/sim.json"],
    ],
)
def test_bad_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        main([SMALL, *flags])


def test_a_load_no_trace_could_have_is_refused(tmp_path: Path) -> None:
    row = {"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
    file = tmp_path / "once.jsonl"
    file.write_text(f"{json.dumps(row)}\n" * 2)
    with pytest.raises(CommandError, match="at one moment: '--load trace' plays"):
        main([str(file), "--load", "0.5"])
    assert main([str(file), "--load", "trace", "--replicas", "1"]) == 0


@pytest.mark.parametrize("flag", ["--kv-tokens", "--host-tokens", "--shared-tokens"])
def test_more_tokens_than_could_be_simulated_are_refused(flag: str) -> None:
    with pytest.raises(CommandError, match="holds 268,435,456 tokens at most"):
        main([SMALL, flag, str(10**15)])
