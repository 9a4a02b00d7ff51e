"""The gateways that are compared: ours over fake replicas, the peers over fake OpenAI servers.

Each target is a context manager that gives its process (alone on its CPU) and its port.
"""

from __future__ import annotations

import os
import socket
import struct
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from configs.load import to_toml
from configs.schema import BusConfig, ClusterConfig, ModelConfig, ReplicaConfig, RouterConfig
from events.server import find_binary
from tools.bench.gateway.child import Child, python, until
from tools.bench.gateway.prompts import MODEL

HOST = "127.0.0.1"
_CPUS = sorted(os.sched_getaffinity(0))
TARGET_CPU, OTHER_CPU = _CPUS[0], _CPUS[-1]
REPLICAS = 4
START_S = 60.0
_NO_BOUND = 100_000_000
CONTEXT_TOKENS = 131_072
_CONTEXT_KEY = b"llama.context_length" + struct.pack("<I", 4)


@dataclass(frozen=True, slots=True)
class Setting:
    """`folder` takes files and logs; `tick_ms` is the time between two tokens of a stream."""

    folder: Path
    tick_ms: float
    peers: Path | None
    model: Path


@dataclass(frozen=True, slots=True)
class Running:
    """A target that answers on `port`."""

    child: Child
    port: int


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _get(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def stretched_model(model: Path, folder: Path) -> Path:
    """A copy of a GGUF file that says it takes prompts of 64 KB: nothing is computed with it."""
    data = bytearray(model.read_bytes())
    at = data.index(_CONTEXT_KEY) + len(_CONTEXT_KEY)
    data[at : at + 4] = struct.pack("<I", CONTEXT_TOKENS)
    copy = folder / "model.gguf"
    copy.write_bytes(data)
    return copy


def _cluster(setting: Setting, port: int, bus_port: int) -> Path:
    config = ClusterConfig(
        cluster="bench",
        secret="5a" * 32,
        model=ModelConfig(path=str(setting.model), name=MODEL),
        bus=BusConfig(url=f"nats://{HOST}:{bus_port}"),
        router=RouterConfig(port=port, max_inflight_tokens=_NO_BOUND, max_queued_tokens=_NO_BOUND),
        replicas=tuple(
            ReplicaConfig(id=f"r{number}", port=_free_port(), context_tokens=CONTEXT_TOKENS)
            for number in range(REPLICAS)
        ),
    )
    file = setting.folder / "cluster.toml"
    file.write_text(to_toml(config))
    return file


@contextmanager
def ours(setting: Setting) -> Iterator[Running]:
    """This gateway, with a real nats-server and replicas that tell it what they hold."""
    port, bus_port = _free_port(), _free_port()
    config = _cluster(setting, port, bus_port)
    log = setting.folder
    replicas = python("-m", "tools.bench.gateway.replicas", "--config", str(config))
    bus = [find_binary(), "-a", HOST, "-p", str(bus_port)]
    router = python("-m", "router.app", "--config", str(config))
    with (
        Child(bus, OTHER_CPU, log / "nats.log"),
        Child(
            [*replicas, "--tick-ms", str(setting.tick_ms)], OTHER_CPU, log / "replicas.log"
        ) as fakes,
    ):
        fakes.line(START_S)
        with Child(router, TARGET_CPU, log / "router.log") as child:
            child.line(START_S)
            until(lambda: _get(port, "/ready"), START_S, "not ready")
            yield Running(child, port)


@contextmanager
def direct(setting: Setting) -> Iterator[Running]:
    """No gateway, the fake server itself: what a gateway adds, it adds to this."""
    server = python("-m", "tools.bench.gateway.server", "--workers", "1")
    command = [*server, "--tick-ms", str(setting.tick_ms)]
    with Child(command, OTHER_CPU, setting.folder / "direct.log") as child:
        yield Running(child, int(child.line(START_S)[1]))


@contextmanager
def _peer(name: str, setting: Setting, launch: list[str]) -> Iterator[Running]:
    server = python("-m", "tools.bench.gateway.server", "--workers", str(REPLICAS))
    command = [*server, "--tick-ms", str(setting.tick_ms)]
    port = _free_port()
    with Child(command, OTHER_CPU, setting.folder / "server.log") as workers:
        urls = [f"http://{HOST}:{worker}" for worker in workers.line(START_S)[1:]]
        bound = ["--host", HOST, "--port", str(port), "--prometheus-port", str(_free_port())]
        command = [*python(*launch), *bound, "--policy", "cache_aware", "--worker-urls", *urls]
        with Child(command, TARGET_CPU, setting.folder / f"{name}.log", _environ(setting)) as child:
            until(lambda: _get(port, "/v1/models") or not child.running, START_S, "no answer")
            if not child.running:
                raise RuntimeError(f"{name} ended: {child.said()}")
            yield Running(child, port)


def _environ(setting: Setting) -> dict[str, str]:
    paths = [str(setting.peers)] if setting.peers else []
    return {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}


@contextmanager
def sglang(setting: Setting) -> Iterator[Running]:
    """sglang-router, cache_aware."""
    module = "from sglang_router.cli import main; main()"
    with _peer("sglang", setting, ["-c", module, "launch", "--log-level", "error"]) as running:
        yield running


@contextmanager
def vllm(setting: Setting) -> Iterator[Running]:
    """vllm-router, cache_aware."""
    module = "from vllm_router.launch_router import main; main()"
    with _peer("vllm", setting, ["-c", module, "--log-level", "error"]) as running:
        yield running


Target = Callable[[Setting], "contextmanager[Running]"]
TARGETS: dict[str, Target] = {"warmroute": ours, "sglang": sglang, "vllm": vllm}
_PACKAGES = {"sglang": "sglang_router", "vllm": "vllm_router"}


def missing(names: Sequence[str], peers: Path | None) -> list[str]:
    """Those targets whose package is neither installed here nor in the folder `peers`."""
    return [
        name
        for name in names
        if (package := _PACKAGES.get(name)) is not None
        and not (peers and (peers / package).exists())
        and find_spec(package) is None
    ]
