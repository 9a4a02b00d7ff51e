"""What the commands say to a wrong flag, a wrong file, and to no flag at all."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from configs.load import ConfigError
from tests.fakes.tiny_model import write_tiny_gguf
from tools import cli
from tools.errors import CommandError
from tools.up import present
from tools.up.command import READY, few_blocks, options_of


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("up --port 80000", "takes 0 to 65535"),
        ("up --port -1", "takes 0 to 65535"),
        ("up --kv-blocks 0", "takes 1 or more"),
        ("up --replicas x", "takes a whole number, not 'x'"),
        ("bench demo --load x", "takes a number above 0"),
        ("up --threads 0", "takes 1 or more"),
        ("up --device foo", "takes cpu, cuda or cuda:N, not 'foo'"),
        ("up --kv-bytes 5", "takes bytes, 1048576 or more"),
        ("up --policy nope", "round_robin"),
        ("warm {tmp}/p.jsonl --replicas 0", "takes 1 or more"),
        ("warm {tmp}/p.jsonl --json {tmp}/missing/x.json", "can't write"),
        ("explain", "FILE --prompt"),
        ("explain {tmp}/p.jsonl --prompt x", "not allowed with"),
        ("bench demo --json {tmp}/missing/x.json", "can't write"),
        ("bench demo --json {tmp}", "can't write"),
        ("bench demo --plot {tmp}/x.nope", "ends in .png"),
        ("bench demo --policies round_robin,nope", "unknown policy 'nope'"),
        ("bench demo --policies random,random", "twice"),
        ("bench chunks --streams 0", "takes 1 or more"),
        ("bench", "which one? book, bus, calls"),
        ("bench engine --rounds 0", "takes 1 or more"),
        ("bench engine --threads 0", "takes 1 or more"),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_starts(
    line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(line.format(tmp=tmp_path).split())
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("up --replicas 65", "1 to 64"),
        ("up --prefill 1", "some that answer"),
        ("up --prefill 1 --decode 1 --kv-host off", "a store that all share"),
        ("up --cluster a.b", "--cluster: an id needs"),
        ("up --kv-host here", "--kv-host takes auto, inproc, off"),
        ("up --bridge", "--bridge needs a --backend"),
        ("up --no-cache-salt", "--no-cache-salt needs a --backend"),
        ("up --backend-model m", "--backend-model needs a --backend"),
        ("up --kv-host {tmp}/kvd.sock", "no kvd listens at {tmp}/kvd.sock"),
        ("up --device cuda", "no GPU driver"),
        ("sim {tmp}/missing.jsonl", "missing.jsonl: No such file"),
        ("up --model {tmp}/missing.gguf", "no model at"),
        ("warm {tmp}/p.jsonl --state {tmp}/none", "no cluster in"),
        ("explain --prompt x --state {tmp}/none", "no cluster in"),
        ("bench demo --state {tmp}/none", "no cluster in"),
        ("kv stats --state {tmp}/none", "no cluster in"),
        ("bench engine --model {tmp}/missing.gguf", "No such file"),
        ("bench engine --model {tmp}/garbage.gguf", "not a GGUF file"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    line: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "garbage.gguf").write_text("garbage")
    monkeypatch.setattr(present, "GPU_FILES", (str(tmp_path / "none"),))
    assert cli.main(line.format(tmp=tmp_path).split()) == 1
    said = capsys.readouterr().err
    assert words.format(tmp=tmp_path) in said
    assert len(said.splitlines()) == 1


def test_a_kvd_that_runs_is_taken(tmp_path: Path, tiny_model: Path) -> None:
    with socket.socket(socket.AF_UNIX) as kvd:
        kvd.bind(str(tmp_path / "kvd.sock"))
        kvd.listen()
        options = options_of(["--model", str(tiny_model), "--kv-host", str(tmp_path / "kvd.sock")])
    assert options.kv.host == str(tmp_path / "kvd.sock")


def test_the_printed_snippet_can_be_pasted() -> None:
    text = READY.format(url="http://127.0.0.1:8000", key="sk", model="m", folder="/s")
    snippet = text[text.index("from openai") : text.index("Logs and keys")]
    compile(snippet, "snippet", "exec")
    assert textwrap.dedent(snippet) == snippet
    # A small model may go on until its context ends: the first answer would take minutes.
    assert "max_tokens=64" in snippet
    command = shlex.split(text[text.index("curl") : text.index("from openai")])
    assert json.loads(command[command.index("-d") + 1])["max_tokens"] == 64


def test_too_few_blocks_for_one_context_are_warned_of(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf", context=2_048)

    def warning(blocks: int) -> str | None:
        return few_blocks(options_of(["--model", str(model), "--kv-blocks", str(blocks)]))

    assert warning(128) is None
    assert "--kv-blocks 127 holds 2032 tokens" in (warning(127) or "")
    assert "128 blocks hold one" in (warning(127) or "")


def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    script = (
        "import sys, types, tools.cli as cli, tools.commands as commands\n"
        "many = types.ModuleType('many')\n"
        "many.main = lambda words: [print('x' * 99) for _ in range(10_000)] and 0\n"
        "sys.modules['many'] = many\n"
        "commands.COMMANDS['warm'] = ('many', '')\n"
        "sys.exit(cli.main(['warm']))\n"
    )
    command = f'{sys.executable} -c "$SCRIPT" | head -n 1'
    run = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "SCRIPT": script},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.stdout == "x" * 99 + "\n"
    assert run.stderr == ""


def test_ctrl_c_while_the_command_line_is_still_read_is_no_traceback() -> None:
    """A real signal, in the midst of what is imported first."""
    script = (
        "import os, signal, sys, tools.cli as cli\n"
        # What a shell runs in the background ignores the signal, and so do its children.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Hasty:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'configs.load':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "for name in [name for name in sys.modules if name.startswith('configs')]:\n"
        "    sys.exit(f'{name} was imported before anything could be said')\n"
        "sys.meta_path.insert(0, Hasty())\n"
        "sys.exit(cli.main(['up']))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")


def test_adapters_that_are_not_there_are_refused_before_a_model_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMROUTE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(CommandError, match=r"--lora: no folder at .*/none"):
        options_of(["--lora", f"x={tmp_path / 'none'}"])
    with pytest.raises(CommandError, match="NAME=PATH"):
        options_of(["--lora", "x"])
    with pytest.raises(CommandError, match="is taken"):
        options_of(["--lora", f"x={tmp_path}", "--lora", f"x={tmp_path}"])
    assert not list(tmp_path.iterdir())


def test_4_bit_weights_are_refused_before_anything_starts(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a GGUF file with Q4_1 weights"):
        options_of(["--model", str(tiny_model), "--weights", "q4"])
    kept = write_tiny_gguf(tmp_path / "q4.gguf", q4=True)
    options = options_of(["--model", str(kept), "--weights", "q4"])
    assert options.replica_settings["weights"] == "q4"
