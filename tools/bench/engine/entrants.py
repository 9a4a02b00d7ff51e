"""Who takes part: ours, and the peers that are found here or in environments that flags name."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from ctypes.util import find_library
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tools.errors import CommandError

US = "us"
US_Q4 = "us_q4"
LLAMA_CPP = "llama.cpp"
_BF16 = "-bf16"
_SCRIPTS = Path(__file__).parent / "peers"


@dataclass(frozen=True, slots=True)
class Entrant:
    """How one is started. `library`: of llama.cpp, empty for its interpreter's own. `dtype`: what
    its weights are asked to be; "file" for what the model's file holds. `settings`: of ours."""

    name: str
    command: list[str]
    dtype: str
    library: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def reads_file(self) -> bool:
        """Whether it takes our model file as it is."""
        return self.name.startswith((LLAMA_CPP, US))


def ours(name: str, dtype: str) -> Entrant:
    """This checkout's engine, by the weights that it holds: US or US_Q4."""
    held = "q4" if name == US_Q4 else "dense"
    command = [sys.executable, "-m", "tools.bench.engine.ours"]
    return Entrant(name, command, dtype, settings={"weights": held})


def peers(named: Mapping[str, str], dtype: str) -> list[Entrant]:
    """Those of `named` (by PEERS' names), and what else is found. Raises CommandError."""
    found = []
    for name, find in PEERS.items():
        place = named.get(name)
        where = _checked(name, place) if place else find()
        if where is not None:
            found.append(_entrant(name, where, dtype))
    return found


def _entrant(name: str, where: str, dtype: str) -> Entrant:
    """`where` is an interpreter, or what holds llama.cpp's library."""
    script = str(_SCRIPTS / f"{name.removesuffix(_BF16).replace('.', '_')}_peer.py")
    if name.startswith(LLAMA_CPP):
        kind = dtype if name.endswith(_BF16) else "file"
        runs = _is_program(where)
        return Entrant(
            name, [where if runs else sys.executable, script], kind, "" if runs else where
        )
    return Entrant(name, [where, script], dtype)


def _checked(name: str, place: str) -> str:
    path = Path(place).absolute()
    if path.is_dir() and not name.startswith(LLAMA_CPP):
        path = path / "bin" / "python"
    if not path.exists():
        raise CommandError(f"--peer {name}={place}: nothing there")
    return str(path)


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK) and ".so" not in Path(path).name


def _transformers() -> str | None:
    return sys.executable if find_spec("transformers") else None


def _llama_cpp() -> str | None:
    if find_spec("llama_cpp"):
        return sys.executable
    return find_library("llama")


def _vllm() -> str | None:
    """The interpreter of the `vllm` command."""
    script = shutil.which("vllm")
    if script is None:
        return None
    with open(script, "rb") as file:
        first = file.readline().decode(errors="replace").strip()
    return first.removeprefix("#!") if first.startswith("#!/") else None


def _nowhere() -> str | None:
    return None


PEERS = {
    "transformers": _transformers,
    LLAMA_CPP: _llama_cpp,
    LLAMA_CPP + _BF16: _nowhere,
    "vllm": _vllm,
}
"""By name, how each is looked for."""
