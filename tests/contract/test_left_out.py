"""What a run leaves out, it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

def test_plain(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.browser
def test_browser(): pass
"""


def run(folder: Path, *flags: str) -> str:
    """A pytest run of TESTS under the project's own conftest and no browser; its output."""
    (folder / "conftest.py").write_text("from tests.conftest import *  # noqa: F403\n")
    (folder / "test_marked.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags]
    markers = "--override-ini=markers=slow\nbrowser\ntraces\ngpu"
    # The plugins that other tests need take longer to load than these take.
    plain = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environ = os.environ | plain | {"PYTHONPATH": str(ROOT), "PATH": str(folder)}
    found = subprocess.run(
        [*command, markers], cwd=folder, env=environ, capture_output=True, text=True, check=True
    )
    return found.stdout


def test_default_run(tmp_path: Path) -> None:
    said = run(tmp_path)
    assert "1 passed" in said
    assert "left out: 1 (browser: no Chromium found)" in said
    assert "left out: 1 (slow: run with -m slow)" in said


def test_slow_on_request(tmp_path: Path) -> None:
    said = run(tmp_path, "-m", "slow")
    assert "1 passed" in said
    assert "slow:" not in said
