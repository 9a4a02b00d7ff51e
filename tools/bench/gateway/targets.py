"""The gateways that are compared: ours over fake replicas, the peers over fake OpenAI servers.

Each target is a context manager that gives its process (alone on its CPU) and its port.
"""

from __future__ import annotations

import os
import struct
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from configs.load import to_toml
from configs.schema import BusConfig, ClusterConfig, ModelConfig, ReplicaConfig, RouterConfig
from events.server import find_binary
from tools.bench.child import Child, python, until
from tools.bench.gateway.prompts import MODEL
from tools.bench.peers import HOST, PEERS, Before, environ, free_port
from tools.bench.peers import missing as not_installed
from tools.errors import CommandError

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
            ReplicaConfig(id=f"r{number}", port=free_port(), context_tokens=CONTEXT_TOKENS)
            for number in range(REPLICAS)
        ),
    )
    file = setting.folder / "cluster.toml"
    file.write_text(to_toml(config))
    return file


@contextmanager
def ours(setting: Setting, program: Sequence[str] = ("-m", "router.app")) -> Iterator[Running]:
    """This gateway, with a real nats-server and replicas that tell it what they hold."""
    port, bus_port = free_port(), free_port()
    config = _cluster(setting, port, bus_port)
    log = setting.folder
    replicas = python("-m", "tools.bench.gateway.replicas", "--config", str(config))
    bus = [find_binary(), "-a", HOST, "-p", str(bus_port)]
    router = python(*program, "--config", str(config))
    with (
        Child(bus, OTHER_CPU, log / "nats.log"),
        Child(
            [*replicas, "--tick-ms", str(setting.tick_ms)], OTHER_CPU, log / "replicas.log"
        ) as fakes,
    ):
        fakes.line(START_S)
        with Child(router, TARGET_CPU, log / "router.log") as child:
            child.line(START_S)
            until(lambda: _get(port, "/ready"), START_S, "the router was not ready")
            yield Running(child, port)


@contextmanager
def direct(setting: Setting) -> Iterator[Running]:
    """No gateway, the fake server itself: what a gateway adds, it adds to this."""
    server = python("-m", "tools.bench.gateway.server", "--workers", "1")
    command = [*server, "--tick-ms", str(setting.tick_ms)]
    with Child(command, OTHER_CPU, setting.folder / "direct.log") as child:
        yield Running(child, int(child.line(START_S)[1]))


@contextmanager
def floor(setting: Setting) -> Iterator[Running]:
    """Bytes passed on by an event loop of ours, before a gateway has done anything for them."""
    server = python("-m", "tools.bench.gateway.server", "--workers", str(REPLICAS))
    command = [*server, "--tick-ms", str(setting.tick_ms)]
    with Child(command, OTHER_CPU, setting.folder / "server.log") as workers:
        ports = workers.line(START_S)[1:]
        command = python("-m", "tools.bench.gateway.floor", *ports)
        with Child(command, TARGET_CPU, setting.folder / "floor.log") as child:
            yield Running(child, int(child.line(START_S)[1]))


@contextmanager
def _peer(name: str, setting: Setting) -> Iterator[Running]:
    """A peer with its cache-aware policy. Raises CommandError where it does not answer."""
    server = python("-m", "tools.bench.gateway.server", "--workers", str(REPLICAS))
    command = [*server, "--tick-ms", str(setting.tick_ms)]
    port, peer = free_port(), PEERS[name]
    with Child(command, OTHER_CPU, setting.folder / "server.log") as workers:
        urls = tuple(f"http://{HOST}:{worker}" for worker in workers.line(START_S)[1:])
        flags = peer.flags(port, Before(urls, MODEL, setting.model, setting.folder))
        command = [*(peer.command(setting.peers) or []), *flags]
        log = setting.folder / f"{name}.log"
        with Child(command, TARGET_CPU, log, environ(setting.peers)) as child:
            until(
                lambda: _get(port, "/v1/models") or not child.running,
                START_S,
                f"{name} did not answer",
            )
            if not child.running:
                raise CommandError(f"{name} ended: {child.said()}")
            yield Running(child, port)


Target = Callable[[Setting], "contextmanager[Running]"]
TARGETS: dict[str, Target] = {
    "warmroute": ours,
    "floor": floor,
    "sglang": partial(_peer, "sglang-router"),
    "vllm": partial(_peer, "vllm-router"),
}
_PEERS = {"sglang": "sglang-router", "vllm": "vllm-router"}


def missing(names: Sequence[str], peers: Path | None) -> list[str]:
    """Those targets whose package is neither installed here nor in the folder `peers`."""
    return [name for name in names if name in _PEERS and not_installed([_PEERS[name]], peers)]
