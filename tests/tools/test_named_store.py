"""The store that `--kv-remote` names: looked at once before the replicas use it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tools.errors import CommandError
from tools.up.remote import named_store
from tools.up.state import open_state


@pytest.mark.parametrize("url", ["foo", "nfs:///x", "file://host/x", "valkey://:secret@h:notaport"])
def test_a_url_that_names_no_store_is_refused_before_anything_starts(url: str) -> None:
    with pytest.raises(CommandError, match="--kv-remote: ") as refused:
        named_store(url)
    assert "secret" not in str(refused.value)


def test_a_store_that_does_not_answer_is_told_of() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        said = named_store(f"valkey://:secret@127.0.0.1:{port}").look()
    assert said.startswith(f"valkey://127.0.0.1:{port} does not answer")
    assert "secret" not in said


def test_a_store_that_answers_is_named(tmp_path: Path) -> None:
    assert named_store(f"file://{tmp_path}/kv").look() == f"file://{tmp_path}/kv"


def test_a_state_folder_with_a_store_is_opened_again(tmp_path: Path) -> None:
    open_state(tmp_path / "state")
    (tmp_path / "state" / "valkey").mkdir()
    open_state(tmp_path / "state")
