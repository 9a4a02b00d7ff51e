"""`warmroute bench live`: texts of asked lengths, open loop, intervals, a run against a server."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from configs.model.card import ModelCard, load_card
from tools.bench import cli, peers
from tools.bench.child import Child, python
from tools.bench.client import Sample
from tools.bench.live.figures import Slo, figures
from tools.bench.live.plan import Plan, asks, shortened, times, wording
from tools.bench.live.play import Played, play
from tools.bench.live.target import target
from tools.bench.live.texts import Texts
from tools.errors import CommandError
from tools.fetch import default_model
from tools.sim.generate import generate


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return load_card(default_model())


def test_a_prompt_has_as_many_tokens_as_asked_for_and_shares_what_its_blocks_say(
    card: ModelCard,
) -> None:
    known = wording(card)
    texts = Texts(known.words, 16, "seed")
    ids = {}
    for blocks, tokens in (((1, 2, 3), 48), ((1, 2, 4), 48), ((1, 2), 37), ((5,), 9)):
        message = {"role": "user", "content": texts.prompt(blocks, tokens - known.overhead_tokens)}
        segments = card.template.render([message], add_generation_prompt=True)
        if tokens > known.overhead_tokens:
            ids[blocks] = card.tokenizer.encode_segments(segments)
            assert abs(len(ids[blocks]) - tokens) <= 1
    assert texts.prompt((1, 2, 3), 48).split()[:32] == texts.prompt((1, 2, 4), 48).split()[:32]
    assert texts.prompt((1, 2, 3), 48) != texts.prompt((1, 2, 4), 48)
    assert texts.prompt((1, 2), 40).split()[:32] == texts.prompt((1, 2, 3), 40).split()[:32]
    other = Texts(known.words, 16, "another seed")
    assert other.prompt((1,), 16) != texts.prompt((1,), 16)


def test_a_shortened_trace_shares_what_it_shared() -> None:
    trace = generate("groups:groups=2,prompts=2,system=1600,question=300,rates=5,stage_s=4")
    short = shortened(trace, 10, 12)
    assert short.block_tokens == 10
    assert len(short.calls) == 12
    for long, call in zip(trace.calls, short.calls, strict=False):
        assert call.prompt_tokens == long.prompt_tokens / 10
        assert call.output_tokens == long.output_tokens / 10
        assert np.array_equal(call.blocks, long.blocks)


def test_times_are_the_traces_own_or_a_process_fixed_by_its_seed() -> None:
    trace = generate("groups:rates=5,stage_s=20,arrival=constant,output=0")
    own = times(trace, "trace", None, 1)
    assert own[1] - own[0] == pytest.approx(0.2)
    assert times(trace, "trace", 50.0, 1)[-1] == pytest.approx(own[-1] / 10, rel=0.02)
    assert np.diff(times(trace, "constant", 2.0, 1)) == pytest.approx(0.5)
    poisson = times(trace, "poisson", 2.0, 7)
    assert poisson == times(trace, "poisson", 2.0, 7) != times(trace, "poisson", 2.0, 8)
    assert np.diff(poisson).mean() == pytest.approx(0.5, rel=0.4)


def _sample(ttft_ms: float, cached: int = 0, error: str = "") -> Sample:
    return Sample("t", 0, "r0", ttft_ms, 2 * ttft_ms, (5.0, 15.0), 100, cached, 3, "", error)


def _played(*samples: Sample) -> Played:
    return Played(samples, (0.0,) * len(samples), 1.0, 0.1)


def test_intervals_hold_the_value_and_ratios_are_of_pairs() -> None:
    rng = np.random.default_rng(3)
    slow = [[_sample(float(ms), 40) for ms in rng.exponential(100, 60)] for _ in range(3)]
    rounds = {
        "a": [_played(*of) for of in slow],
        "b": [_played(*(_sample(s.ttft_ms / 2, 80) for s in of)) for of in slow],
    }
    found = figures(rounds, Slo(100.0), seed=1, draws=200)
    mean = found["a"]["ttft_mean_ms"]
    assert mean["low"] < mean["value"] < mean["high"]
    assert found["b"]["over_first"]["ttft_mean_ms"]["low"] == pytest.approx(0.5)
    assert found["b"]["over_first"]["ttft_mean_ms"]["high"] == pytest.approx(0.5)
    assert found["b"]["cached_token_ratio"]["value"] == pytest.approx(0.8)
    assert found == figures(rounds, Slo(100.0), seed=1, draws=200)
    tight = figures(rounds, Slo(100.0, 9.0), seed=1, draws=5)
    assert tight["a"]["slo_share"]["value"] == 0
    json.dumps(found, allow_nan=False)


def test_a_failed_request_is_bad_and_no_time() -> None:
    rounds = {"a": [_played(_sample(50.0), _sample(0.0, error="http 500"))]}
    found = figures(rounds, Slo(100.0), seed=1, draws=10)["a"]
    assert found["slo_share"]["value"] == 0.5
    assert found["ttft_mean_ms"]["value"] == 50.0
    assert found["errors"] == {"http 500": 1}
    nothing = figures({"a": [_played(_sample(0.0, error="x"))]}, Slo(1.0), seed=1, draws=2)["a"]
    assert nothing["ttft_mean_ms"]["value"] is None
    assert nothing["slo_share"]["value"] == 0
    json.dumps(nothing, allow_nan=False)


@pytest.mark.parametrize(
    "text", ["x", "=http://h:1", "a=ftp://h", "a=http://h:1,b=c", "a=http://h:1,replicas=0"]
)
def test_a_target_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        target(text)


def test_a_targets_key_is_not_in_what_is_written_of_it() -> None:
    of = target("a=http://h:1/v1,key=sk-secret,model=m,replicas=3")
    assert (of.url, of.key, of.model, of.replicas) == ("http://h:1", "sk-secret", "m", 3)
    assert "secret" not in of.about


def test_a_peer_is_found_in_its_folder_or_named_as_missing(tmp_path: Path) -> None:
    (tmp_path / "vllm_router").mkdir()
    assert peers.missing(["vllm-router"], tmp_path) == []
    command = peers.PEERS["vllm-router"].command(tmp_path)
    assert command is not None
    assert command[0] == sys.executable


def test_a_peer_on_path_has_its_own_environments_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "bin" / "vllm-router"
    about = tmp_path / "lib" / "python3.9" / "site-packages" / "vllm_router-9.8.7.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-router\nVersion: 9.8.7\n")
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    assert peers.PEERS["vllm-router"].command(None) == [str(script)]
    assert peers.PEERS["vllm-router"].version(None) == "9.8.7"


@pytest.mark.slow
def test_vllm_gets_a_folder_that_it_can_load(tmp_path: Path) -> None:
    before = peers.Before((), "m", default_model(), tmp_path)
    verb, folder, *_ = peers.PEERS["vllm"].flags(1, before)
    assert verb == "serve"
    with safe_open(Path(folder) / "model.safetensors", "np") as weights:
        assert "model.embed_tokens.weight" in weights.keys()  # noqa: SIM118
    config = json.loads((Path(folder) / "config.json").read_text())
    assert config["eos_token_id"]
    assert (Path(folder) / "tokenizer.json").exists()


def _plan(port: int, at_s: list[float], output: int, card: ModelCard) -> Plan:
    trace = generate("groups:rates=5,stage_s=20,arrival=constant")
    calls = shortened(trace, 100, len(at_s)).calls
    known = wording(card)
    return Plan(
        url=f"http://127.0.0.1:{port}",
        key="",
        model="bench",
        extra={"max_tokens": output},
        seed="1",
        words=known.words,
        block_tokens=1,
        asks=asks(calls, at_s, known.overhead_tokens),
    )


async def test_the_client_waits_for_no_answer(tmp_path: Path, card: ModelCard) -> None:
    server = python("-m", "tools.bench.gateway.server", "--workers", "1", "--tick-ms", "40")
    with Child(server, None, tmp_path / "log") as child:
        port = int(child.line(20)[1])
        count: list[None] = []
        plan = _plan(port, [0.0, 0.05, 0.1, 0.15], 20, card)
        played = await play(plan, lambda: count.append(None))
    assert len(count) == len(played.samples) == 4
    assert not any(sample.error for sample in played.samples)
    # One after the other they would take the sum of their times.
    assert sum(sample.e2e_ms for sample in played.samples) > 2 * 1e3 * played.wall_s


async def test_a_server_that_is_gone_is_an_error_of_each_request(card: ModelCard) -> None:
    played = await play(_plan(peers.free_port(), [0.0, 0.0], 1, card), lambda: None)
    assert {sample.error for sample in played.samples} == {"ClientConnectorError"}


@pytest.mark.slow
def test_a_run_is_written_with_all_that_it_depends_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = python("-m", "tools.bench.gateway.server", "--workers", "2", "--tick-ms", "1")
    file, picture = tmp_path / "live.json", tmp_path / "live.png"
    with Child(server, None, tmp_path / "log") as child:
        one, other = child.line(20)[1:]
        flags = ["--target", f"one=http://127.0.0.1:{one},key=sk-1"]
        flags += ["--target", f"other=http://127.0.0.1:{other},model=bench"]
        flags += ["--requests", "6", "--rate", "50", "--rounds", "2", "--warm-up", "0"]
        assert cli.main(["live", *flags, "--json", str(file), "--plot", str(picture)]) == 0
    found = json.loads(file.read_text())
    assert list(found["targets"]) == ["one", "other"]
    assert found["targets"]["one"]["requests"] == 12
    turns = list(dict.fromkeys(re.findall(r"round \d, \w+", capsys.readouterr().out)))
    assert turns == ["round 1, one", "round 1, other", "round 2, one", "round 2, other"]
    assert found["settings"]["slo"] == "TTFT within 2000 ms"
    assert found["settings"]["utilisation"] > 0
    assert "sk-1" not in file.read_text()
    assert picture.stat().st_size > 0


@pytest.mark.parametrize("roles", ["1", "0:1", "1:0", "a:b", "1:2:3"])
def test_roles_that_are_none_are_refused(roles: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["live", "--roles", roles])
    assert "takes two numbers from 1 on" in capsys.readouterr().err


def test_nobody_there_is_one_line() -> None:
    with pytest.raises(CommandError, match="names no model"):
        cli.main(["live", "--target", f"gone=http://127.0.0.1:{peers.free_port()}"])


def test_litellm_shows_each_server_its_own_key(tmp_path: Path) -> None:
    before = peers.Before(("http://a", "http://b"), "m", tmp_path, tmp_path, keys=("ka", "kb"))
    flags = peers.PEERS["litellm"].flags(1, before)
    told = json.loads(Path(flags[flags.index("--config") + 1]).read_text())["model_list"]
    shown = {m["litellm_params"]["api_base"]: m["litellm_params"]["api_key"] for m in told}
    assert shown == {"http://a/v1": "ka", "http://b/v1": "kb"}
    assert "ka" not in " ".join(flags)
