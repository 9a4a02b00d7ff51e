"""Other projects' gateways and servers: where each is installed, and how it is started.

Peers come from this environment, from a folder of `pip install --target`, or from PATH. Each is
started with its own cache-aware policy, where it has one, and its defaults otherwise.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

import msgspec

from configs.schema import ReplicaConfig
from tools.bench.live.folder import write_model

HOST = "127.0.0.1"
BLOCK_TOKENS = ReplicaConfig(id="").block_tokens
VLLM_KV_GIB = "1"
DYNAMO = Path(__file__).parent / "live" / "dynamo" / "serve.py"


def free_port() -> int:
    """Free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Before:
    """What a peer is to stand before: servers of one model; `folder` takes its files. `model_path`
    is for those that load the model, or its tokenizer, themselves. `keys`: of each server, for
    those that always show one. `kv_events`: where each server publishes its cache's changes as
    vLLM does, if it does."""

    urls: tuple[str, ...]
    model: str
    model_path: Path
    folder: Path
    keys: tuple[str, ...] = ()
    kv_events: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Peer:
    """`script` is its command on PATH, `call` the same as Python code of `module`; `flags` makes
    those for a port."""

    package: str
    script: str
    module: str
    call: str
    flags: Callable[[int, Before], list[str]]

    def command(self, folder: Path | None) -> list[str] | None:
        """What starts it, flags apart; None where it is not installed."""
        if (folder and self.lies_in(folder)) or _importable(self.module):
            return [sys.executable, "-c", self.call]
        script = shutil.which(self.script)
        return [script] if script else None

    def lies_in(self, folder: Path) -> bool:
        """Whether it was installed there."""
        return (folder / self.module.split(".")[0]).exists()

    def version(self, folder: Path | None) -> str:
        """Its package's: of the folder, of this environment or of that which its script is of."""
        paths = [*([str(folder)] if folder else []), *sys.path]
        if script := shutil.which(self.script):
            home = Path(script).parent.parent
            paths += map(str, home.glob("lib/python*/site-packages"))
        found = importlib.metadata.distributions(name=self.package, path=paths)
        return next((one.version for one in found), "unknown")


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def environ(folder: Path | None) -> dict[str, str]:
    """So that Python finds what lies in the folder, nobody asks for a key and nobody calls home:
    all listen on loopback, for as long as the benchmark runs."""
    paths = [str(folder)] if folder else []
    return {
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": HOST,
        "VLLM_CPU_KVCACHE_SPACE": VLLM_KV_GIB,
    }


def _bound(port: int, before: Before) -> list[str]:
    prometheus = ["--prometheus-port", str(free_port())]
    return ["--host", HOST, "--port", str(port), *prometheus, "--worker-urls", *before.urls]


def _sglang(port: int, before: Before) -> list[str]:
    return ["launch", "--log-level", "error", "--policy", "cache_aware", *_bound(port, before)]


def _vllm_router(port: int, before: Before) -> list[str]:
    return ["--log-level", "error", "--policy", "cache_aware", *_bound(port, before)]


def _litellm(port: int, before: Before) -> list[str]:
    """Every server as a deployment of one model, in its default strategy (weighted at random)."""
    models = [
        {
            "model_name": before.model,
            "litellm_params": {
                "model": f"openai/{before.model}",
                "api_base": f"{url}/v1",
                "api_key": key,
            },
        }
        for url, key in zip_longest(before.urls, before.keys, fillvalue="none")
    ]
    file = before.folder / "litellm.yaml"  # JSON is YAML
    file.write_bytes(msgspec.json.encode({"model_list": models}))
    return ["--host", HOST, "--port", str(port), "--config", str(file), "--telemetry", "False"]


def _dynamo(port: int, before: Before) -> list[str]:
    """Its frontend with the KV router, and a worker before each server."""
    model = write_model(before.model_path, before.folder / "dynamo-model", weights=False)
    flags = ["--port", str(port), "--model", before.model, "--model-folder", str(model)]
    flags += ["--folder", str(before.folder), "--block-tokens", str(BLOCK_TOKENS)]
    return [*flags, "--worker-urls", *before.urls, "--kv-events", *before.kv_events]


def _vllm(port: int, before: Before) -> list[str]:
    """An engine, not a gateway: it computes by itself, with prefix caching. Eager, as it would
    compile for minutes first."""
    model = write_model(before.model_path, before.folder / "vllm-model", weights=True)
    name = ["--served-model-name", before.model]
    bound = ["--host", HOST, "--port", str(port)]
    told = ["--enable-prompt-tokens-details"]  # how many were cached
    return ["serve", str(model), *name, *bound, *told, "--enable-prefix-caching", "--enforce-eager"]


PEERS = {
    "sglang-router": Peer(
        "sglang-router",
        "smg",
        "sglang_router",
        "from sglang_router.cli import main; main()",
        _sglang,
    ),
    "vllm-router": Peer(
        "vllm-router",
        "vllm-router",
        "vllm_router",
        "from vllm_router.launch_router import main; main()",
        _vllm_router,
    ),
    "litellm": Peer(
        "litellm",
        "litellm",
        "litellm.proxy",
        "import sys; from litellm import run_server; sys.exit(run_server())",
        _litellm,
    ),
    "dynamo": Peer(
        "ai-dynamo",
        "",
        "dynamo.frontend",
        f"import runpy; runpy.run_path({str(DYNAMO)!r}, run_name='__main__')",
        _dynamo,
    ),
    "vllm": Peer(
        "vllm",
        "vllm",
        "vllm.entrypoints.cli",
        "from vllm.entrypoints.cli.main import main; main()",
        _vllm,
    ),
}


def home_of(name: str, folders: Sequence[Path]) -> Path | None:
    """The folder that has it; None where it may be installed without one."""
    return next((folder for folder in folders if PEERS[name].lies_in(folder)), None)


def missing(names: Sequence[str], folder: Path | None) -> list[str]:
    """Those that are installed nowhere."""
    return [name for name in names if PEERS[name].command(folder) is None]
