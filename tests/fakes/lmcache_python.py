"""A stand-in for a Python environment that has lmcache: the calls that the sidecar makes, over a
dict in its own process. The tests of a real server need WARMROUTE_LMCACHE_PYTHON."""

from __future__ import annotations

import os
import runpy
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

CHUNK_TOKENS = 32

SCRIPT = """#!{python}
import sys
sys.path.insert(0, {root!r})
from tests.fakes.lmcache_python import main
main({folder!r}, sys.argv[1:])
"""


def make_python(folder: Path) -> Path:
    """An executable that may be given as `python`; a file `gone` beside it takes its server away,
    and `torn` the last chunk of every value."""
    path = folder / "python"
    root = str(Path(__file__).parents[2])
    path.write_text(SCRIPT.format(python=sys.executable, root=root, folder=str(folder)))
    path.chmod(0o755)
    return path


@dataclass(frozen=True)
class Payload:
    instance_id: int
    model_name: str
    world_size: int
    block_size: int
    num_layers: int
    hidden_dim_size: int
    dtype_str: str
    use_mla: bool
    num_physical_slots: int


@dataclass(frozen=True)
class Said:
    shm_name: str = "shared"
    pool_size: int = 1 << 20


@dataclass(frozen=True)
class Key:
    model_name: str
    world_size: int
    worker_id: int | None
    token_ids: tuple[int, ...]
    start: int
    end: int
    request_id: str
    cache_salt: str
    num_kv_readers: int

    def no_worker_id_version(self) -> Key:
        return replace(self, worker_id=None)

    def chunks(self) -> list[tuple[int, ...]]:
        ends = range(CHUNK_TOKENS, len(self.token_ids) + 1, CHUNK_TOKENS)
        return [self.token_ids[:end] for end in ends]


class Slot:
    """As much of a tensor as is asked for."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data

    def view(self, shape: int) -> Slot:
        assert shape == -1
        return self

    def numpy(self) -> np.ndarray:
        return self._data


class Future:
    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self, timeout: float) -> Any:
        if Client.gone():
            time.sleep(0.01)
            raise TimeoutError
        return self._value


class Client:
    folder = Path()
    slot_bytes = 0
    shelf: ClassVar[dict[tuple[int, ...], np.ndarray]] = {}
    held: ClassVar[dict[str, int]] = {}

    @classmethod
    def gone(cls) -> bool:
        return (cls.folder / "gone").exists()

    def get_chunk_size(self) -> Future:
        return Future(CHUNK_TOKENS)

    def register_kv_cache_engine_driven_context(self, payload: Payload) -> Future:
        Client.slot_bytes = payload.num_physical_slots * payload.hidden_dim_size
        return Future(Said())

    def lookup(self, key: Key, tp_size: int) -> Future:
        assert key.worker_id is None
        found = 0
        for chunk in key.chunks():
            if chunk not in self.shelf:
                break
            found += 1
        self.held[key.request_id] = found
        return Future(None)

    def wait_prefetch_status(self, request_id: str, timeout: float) -> Future:
        return Future(self.held[request_id])

    def free_lookup_locks(self, key: Key, tp_size: int) -> Future:
        assert self.held[key.request_id] == len(key.chunks())
        return Future(None)

    def end_session(self, request_id: str) -> Future:
        self.held.pop(request_id, None)
        return Future(None)

    def close(self) -> None:
        pass


class Shared:
    def __init__(
        self, metadata: None, client: Client, timeout: float, name: str, size: int
    ) -> None:
        self._client = client
        self._writing: dict[tuple[int, ...], np.ndarray] = {}

    def prepare_store(self, key: Key, instance: int) -> tuple[list[Slot], list[int]]:
        places = [at for at, one in enumerate(key.chunks()) if one not in self._client.shelf]
        slots = [np.zeros(Client.slot_bytes, np.uint8) for _ in places]
        self._writing = dict(zip([key.chunks()[at] for at in places], slots, strict=True))
        return [Slot(slot) for slot in slots], places

    def commit_store(self, key: Key, instance: int, chunks: list[Any]) -> bool:
        self._client.shelf.update(self._writing)
        if (Client.folder / "torn").exists():
            del self._client.shelf[key.token_ids]
        return True

    def prepare_retrieve(self, key: Key, instance: int) -> list[Slot]:
        return [Slot(self._client.shelf[chunk]) for chunk in key.chunks()]

    def commit_retrieve(self, key: Key, instance: int) -> bool:
        return True

    def close(self) -> None:
        pass


class Factory:
    @staticmethod
    def create(url: str, context: Any) -> Client:
        assert url.startswith("tcp://")
        if Client.gone():
            raise TimeoutError
        return Client()


def main(folder: str, arguments: list[str]) -> None:
    """As `python -I PROGRAM ...`."""
    Client.folder = Path(folder)
    base = "lmcache.v1.multiprocess"
    for name, words in (
        ("lmcache", {}),
        ("lmcache.v1", {}),
        (base, {}),
        (f"{base}.custom_types", {"RegisterEngineDrivenContextPayload": Payload}),
        (f"{base}.transfer_context", {}),
        (f"{base}.transfer_context.shm", {"EngineDrivenContextShm": Shared}),
        (f"{base}.transport", {}),
        (f"{base}.transport.factory", {"RequestClientFactory": Factory}),
    ):
        module = ModuleType(name)
        vars(module).update(words, __path__=[])
        sys.modules[name] = module
    vars(sys.modules[f"{base}.custom_types"])["IPCCacheServerKey"] = Key
    assert arguments[0] == "-I"
    if (Client.folder / "bare").exists():
        os._exit(1)
    sys.argv = arguments[1:]
    runpy.run_path(arguments[1], run_name="__main__")
