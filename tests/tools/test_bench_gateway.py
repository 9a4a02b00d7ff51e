"""The gateways' benchmark, small: real processes, few requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import cli
from tools.bench.gateway import command, targets
from tools.bench.gateway.prompts import SIZES, TAIL_CHARS, requests, templates
from tools.cli import main as warmroute


def test_bodies_share_their_head_and_have_tails_of_their_own() -> None:
    for size, size_bytes in SIZES.items():
        made = requests(templates(size_bytes, stream=False, max_tokens=1))
        bodies = [next(made) for _ in range(3)]
        assert len(set(bodies)) == 3, size
        for sent in bodies:
            head, _, body = sent.partition(b"\r\n\r\n")
            assert f"Content-Length: {len(body)}".encode() in head
            asked = json.loads(body)
            assert size_bytes * 0.9 < len(body) < size_bytes * 1.3
            assert asked["messages"][1]["content"][-TAIL_CHARS:].isdecimal()


def test_clients_count_what_a_fake_server_says(tmp_path: Path) -> None:
    setting = targets.Setting(tmp_path, tick_ms=1.0, peers=None, model=tmp_path)
    with targets.direct(setting) as running:
        plain = command._load(running, "2k", 2, "--requests", "20")
        streams = command._load(
            running, "2k", 2, "--stream", "--max-tokens", "20", "--requests", "4"
        )
    assert plain["requests"] >= 20
    assert len(plain["times_ms"]) == plain["requests"]
    assert streams["chunks"] >= 20 * 4
    assert plain["errors"] == streams["errors"] == 0


def test_a_peer_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "vllm_router").mkdir()
    assert "vllm" not in targets.missing(["vllm"], tmp_path)
    assert targets.missing(["warmroute"], tmp_path) == []


def test_a_peer_that_does_not_start_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm_router").mkdir()
    (tmp_path / "vllm_router" / "launch_router.py").write_text(
        "def main():\n    raise OSError('libssl.so is not there')\n"
    )
    (tmp_path / "model.gguf").write_bytes(targets._CONTEXT_KEY + bytes(4))
    flags = ["--targets", "vllm", "--peers", str(tmp_path), "--samples", "5"]
    flags += ["--model", str(tmp_path / "model.gguf")]
    assert warmroute(["bench", "gateway", *flags]) == 1
    told = capsys.readouterr().err.strip()
    assert told == "warmroute bench: vllm-router ended: OSError: libssl.so is not there"


@pytest.mark.slow
def test_the_figures_of_our_gateway_are_written(tmp_path: Path) -> None:
    file = tmp_path / "gateway.json"
    flags = ["--targets", "warmroute", "--seconds", "0.3", "--samples", "5", "--json", str(file)]
    assert cli.main(["gateway", *flags]) == 0
    found = json.loads(file.read_text())
    assert found["cpu_us_per_request"]["2k"]["warmroute"] > 0
    assert found["rps"]["64k"]["warmroute"] > 0
    assert found["chunks_per_s"]["warmroute"] > 0
    assert found["ttft_added_ms"]["p99"]["warmroute"] >= found["ttft_added_ms"]["p50"]["warmroute"]


@pytest.mark.slow
def test_calls_are_counted_by_module_and_function(tmp_path: Path) -> None:
    file = tmp_path / "calls.json"
    assert cli.main(["calls", "--requests", "20", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["2k"]["router/choice/choose:RouterBrain.decide"]["python"] == 1.0
    assert found["64k"]["router/serving/generate:Generator._generate"]["python"] >= 1.0
    assert found["delta"]["router/dispatch/chutes:Chutes.cast"]["python"] > 0.5
