"""The file that `warmroute warm` reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.errors import CommandError
from tools.warm import read_prompts


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    return str(file)


def test_reads_both_kinds_and_skips_blank_lines(tmp_path: Path) -> None:
    prompts = read_prompts(write(tmp_path, '{"prompt": "a"}\n\n{"messages": [], "other": 1}\n'))
    assert prompts == [{"prompt": "a"}, {"messages": []}]


@pytest.mark.parametrize("line", ["[]", "{}", "nope", '{"text": 1}', "[" * 5000])
def test_O8_names_the_line_and_never_its_content(tmp_path: Path, line: str) -> None:
    with pytest.raises(CommandError, match="line 1") as refused:
        read_prompts(write(tmp_path, line))
    assert line not in str(refused.value)


def test_nothing_to_warm_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="holds no prompt"):
        read_prompts(write(tmp_path, "\n"))
    with pytest.raises(CommandError, match="No such file"):
        read_prompts(str(tmp_path / "missing"))
