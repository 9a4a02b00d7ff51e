"""Models for all tests, and what is left out of a run: said at its end, never silently."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.fakes.tiny_model import write_tiny_gguf
from tools.fetch import default_model

ROOT = Path(__file__).parents[1]
TRACES = ROOT.parent / "shared" / "data"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ON_REQUEST = ("slow", "soak", "traces", "gpu", "vllm")
LEFT_OUT = pytest.StashKey[Counter[str]]()

# Every run draws the same examples, and a busy machine is no failure.
settings.register_profile(
    "warmroute", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("warmroute")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model."""
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The default model, as set-up fetched it."""
    return default_model()


@cache
def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _lacking(marker: str) -> str | None:
    """Why tests with this marker can't run here."""
    if marker == "browser" and not any(map(shutil.which, BROWSERS)):
        return "no Chromium found"
    if marker == "traces" and not TRACES.is_dir():
        return f"{TRACES} is missing"
    if marker == "gpu" and not _has_cuda():
        return "no CUDA device"
    if marker == "vllm" and "WARMROUTE_VLLM" not in os.environ:
        return "WARMROUTE_VLLM names no server"
    return None


def _reason(item: pytest.Item, selected: str) -> str | None:
    """Why this test is left out, if it is."""
    markers = {mark.name for mark in item.iter_markers()}
    for marker in ON_REQUEST:
        if marker in markers and marker not in selected:
            return f"{marker}: run with -m {marker}"
    for marker in sorted(markers & {"browser", "traces", "gpu", "vllm"}):
        if lacking := _lacking(marker):
            return f"{marker}: {lacking}"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected = config.getoption("markexpr", "")
    reasons = [_reason(item, selected) for item in items]
    left_out = [item for item, why in zip(items, reasons, strict=True) if why]
    config.stash[LEFT_OUT] = Counter(why for why in reasons if why)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item, why in zip(items, reasons, strict=True) if not why]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of several tells the one that reports."""
    told = getattr(session.config, "workeroutput", None)
    if told is not None:
        told["left_out"] = dict(session.config.stash.get(LEFT_OUT, Counter()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each worker collects everything: what one left out all have left out."""
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for why, count in sorted(config.stash.get(LEFT_OUT, Counter()).items()):
        terminalreporter.write_line(f"left out: {count} ({why})")
