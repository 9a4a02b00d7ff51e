"""`warmroute bench engine`: its figures, who takes part, and what is said when one can't."""

from __future__ import annotations

import io
import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from configs.model.card import load_card
from configs.model.weights import open_weights
from tests.fakes.tiny_model import write_tiny_gguf
from tools.bench import cli
from tools.bench.engine import ablate, entrants
from tools.bench.engine.contest import Contender, Course, EngineError, Scores, run
from tools.bench.engine.export import export, rounded
from tools.bench.engine.trials import TRIALS
from tools.bench.engine.workload import Mix, calls
from tools.errors import CommandError

PEER = """
    import sys
    sys.path.insert(0, {folder!r})
    from talk import serve

    class Peer:
        def load(self, model, **_):
            print("this is no answer")
            return {{"version": "1", "precision": model}}

        def prefill(self, tokens):
            return {{"seconds": tokens / {speed}}}

        def decode(self, rows, context, steps):
            if rows > 4:
                raise ValueError("too many")
            return {{"seconds": rows * steps / {speed}}}

    serve(Peer())
"""


def peer(tmp_path: Path, name: str, speed: float) -> Contender:
    script = tmp_path / f"{name}.py"
    folder = str(Path(entrants.__file__).parent / "peers")
    script.write_text(textwrap.dedent(PEER.format(folder=folder, speed=speed)))
    return Contender(name, [sys.executable, str(script)], tmp_path / f"{name}.log", None)


def test_contenders_are_asked_in_turn_and_compared_round_by_round(tmp_path: Path) -> None:
    course = Course(prefill_tokens=(8,), decode_rows=(1, 4), rounds=2)
    with peer(tmp_path, "slow", 10.0) as slow, peer(tmp_path, "fast", 30.0) as fast:
        assert slow.load({"model": "m"}) == {"version": "1", "precision": "m"}
        scores = run([slow, fast], course, lambda line: None)
    assert scores["slow"].figures()["prefill"] == {"8": pytest.approx(10.0)}
    assert scores["fast"].figures()["decode"] == {k: pytest.approx(30.0) for k in ("1", "4")}
    ratios = scores["fast"].ratios(scores["slow"])
    assert ratios["decode"] == {k: pytest.approx(3.0) for k in ("1", "4")}
    assert "this is no answer" in (tmp_path / "slow.log").read_text()


def test_what_goes_wrong_in_a_contender_is_said_by_name(tmp_path: Path) -> None:
    course = Course(prefill_tokens=(8,), decode_rows=(1, 8))
    with peer(tmp_path, "small", 10.0) as small:
        small.load({"model": "m"})
        with pytest.raises(EngineError, match="small: ValueError: too many"):
            run([small], course, lambda line: None)
    gone = Contender("gone", [sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log", None)
    with gone, pytest.raises(EngineError, match="gone"):
        gone.load({"model": "m"})


def test_the_median_is_that_of_the_rounds_ratios_not_of_their_figures() -> None:
    ours, theirs = Scores(), Scores()
    ours.prefill[512], theirs.prefill[512] = [10.0, 200.0, 30.0], [5.0, 50.0, 30.0]
    assert ours.ratios(theirs) == {"prefill": {"512": 2.0}, "decode": {}}


def test_peers_come_from_flags_or_are_found(tmp_path: Path) -> None:
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch(mode=0o755)
    library = tmp_path / "libllama.so"
    library.touch()
    named = {"vllm": str(tmp_path / "env"), "llama.cpp-bf16": str(library)}
    found = {each.name: each for each in entrants.peers(named, "bfloat16")}
    assert found["vllm"].command[0] == str(python)
    assert not found["vllm"].reads_file
    bf16 = found["llama.cpp-bf16"]
    assert bf16.reads_file
    assert (bf16.library, bf16.dtype, bf16.command[0]) == (str(library), "bfloat16", sys.executable)
    assert all(Path(each.command[1]).is_file() for each in found.values())
    with pytest.raises(CommandError, match="nothing there"):
        entrants.peers({"vllm": str(tmp_path / "none")}, "bfloat16")


def test_an_exported_model_is_ours_to_the_bit_in_bf16(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    write_tiny_gguf(model)
    export(model, tmp_path)
    mine, theirs = open_weights(model), open_weights(tmp_path)
    assert theirs.names == mine.names
    for name in mine.names:
        bits = rounded(mine.tensor(name)).astype(np.uint32) << 16
        assert np.array_equal(theirs.tensor(name), bits.view(np.float32)), name
    shape = theirs.shape
    assert (shape.layers, shape.rope, shape.tied_head) == (
        mine.shape.layers,
        mine.shape.rope,
        mine.shape.tied_head,
    )


@pytest.mark.slow
def test_ours_alone_gives_all_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = tmp_path / "tiny.gguf", tmp_path / "figures.json"
    write_tiny_gguf(model, context=4096, q4=True)
    flags = ["--model", str(model), "--rounds", "1", "--steps", "2", "--context", "8"]
    flags += ["--dtype", "float32", "--alone", "--json", str(out)]
    assert cli.main(["engine", *flags]) == 0
    found = json.loads(out.read_text())
    for name, precision in (("us", "float32"), ("us_q4", "float32, 4-bit weights")):
        mine = found[name]
        assert mine["precision"] == precision
        assert set(mine["prefill"]) == {"512", "2048"}
        assert set(mine["decode"]) == {"1", "4", "16", "64"}
        assert min((*mine["prefill"].values(), *mine["decode"].values())) > 0.0
    assert set(found["ratios_q4"]) == {"us"}
    assert 0.0 < found["overhead_b16"] < 1.0
    assert "overhead of a decode step at batch 16" in capsys.readouterr().out


def test_every_switch_has_a_load_and_is_told_from_noise(tmp_path: Path) -> None:
    card = load_card(write_tiny_gguf(tmp_path / "tiny.gguf", context=2048))
    trials = {
        name: replace(trial, mix=replace(trial.mix, requests=6, answer=(3, 6), long=(80, 100)))
        for name, trial in TRIALS.items()
    }
    small = {"requests": 16, "prefix": 64, "own": (4, 8), "answer": (1, 2), "long": (150, 180)}
    lru = TRIALS["lru_eviction"]
    trials["lru_eviction"] = replace(lru, mix=replace(lru.mix, **small), pool_tokens=288)
    rows = ablate.measure(card, {"dtype": "float32"}, trials, 1, lambda line: None)
    assert set(rows) == set(TRIALS)
    for name, row in rows.items():
        assert row["figure"] == TRIALS[name].figure
        for side in row["all"].values():
            assert side["output_tokens_per_s"] > 0.0
            assert side["itl_p99_ms"] >= side["itl_p50_ms"] > 0.0
    uncached = rows["no_prefix_cache"]["all"]
    assert uncached["default"]["cached_ratio"] > 0.2 > uncached["switched"]["cached_ratio"] == 0.0
    for name in ("lru_eviction", "block_tokens_64"):
        assert rows[name]["ratio"] < 0.9, name
        assert rows[name]["effect"] == "the default is better"
    shown = Console(record=True, width=80, file=io.StringIO())
    ablate.show(rows, shown)
    text = shown.export_text()
    assert all(name in text for name in rows)


@pytest.mark.parametrize(
    ("ratio", "noise", "better", "said"),
    [
        (1.3, 0.5, True, "none seen"),
        (0.8, 0.5, True, "none seen"),
        (1.3, 0.1, True, "the switch is better"),
        (1.3, 0.1, False, "the default is better"),
        (0.5, 0.1, False, "the switch is better"),
    ],
)
def test_an_effect_is_more_than_the_default_differs_from_itself(
    ratio: float, noise: float, better: bool, said: str
) -> None:
    assert ablate._effect(ratio, noise, better) == said


def test_the_workload_is_the_same_every_time_and_mixes_lengths() -> None:
    mix = Mix()
    made = calls(mix, 1_000)
    assert made == calls(mix, 1_000)
    heads = [call.prompt[: mix.prefix] for call in made]
    assert len(set(heads)) <= mix.groups + len(made) // mix.long_one_in
    assert max(len(call.prompt) for call in made) > mix.prefix + mix.own[1]
