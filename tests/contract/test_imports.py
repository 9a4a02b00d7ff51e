"""The arrows between the packages, and who may import torch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "configs": set(),
    "events": {"configs"},
    "kvstore": {"configs", "events"},
    "replica": {"configs", "events", "kvstore"},
    "router": {"configs", "events", "kvstore"},
    "tools": {"configs", "events", "kvstore", "replica", "router"},
}
TORCH_FOLDERS = tuple(
    f"replica/{name}/" for name in ("runner", "attention", "models", "sampling", "lora")
)


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_arrows(package: str) -> None:
    others = set(ALLOWED) - ALLOWED[package] - {package}
    for path in (ROOT / package).rglob("*.py"):
        assert not imported(path) & others, path


def test_torch_stays_in_the_device_folders() -> None:
    for package in ALLOWED:
        for path in (ROOT / package).rglob("*.py"):
            relative = path.relative_to(ROOT).as_posix()
            if package != "tools" and not relative.startswith(TORCH_FOLDERS):
                assert "torch" not in imported(path), path


def test_only_identity_hashes_blocks() -> None:
    for path in (ROOT / "replica").rglob("*.py"):
        assert "hashlib" not in imported(path), path


def test_no_pickle_and_no_eval() -> None:
    for package in ALLOWED:
        for path in (ROOT / package).rglob("*.py"):
            assert not imported(path) & {"pickle", "marshal", "shelve", "dill"}, path
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id not in {"eval", "exec"}, path
