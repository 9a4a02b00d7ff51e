"""The state folder of a local cluster: its secrets, its cluster file, its logs, its lock.

Everything in it is readable by its owner alone. Secrets are made once and kept, so that clients'
keys and block identities survive a restart.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import msgspec

from configs.load import load_cluster, to_toml
from configs.schema import ClusterConfig
from tools.errors import CommandError

OWN_ENTRIES = frozenset(
    (
        "boots cluster.toml cluster.toml.new keys.json keys.json.new kvd.sock kvd.sock.lock lock"
        " logs nats valkey"
    ).split()
)
"""What a state folder may hold."""


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """What the owner of the cluster holds in clear; the cluster file has hashes where it can."""

    secret: str
    admin_key: str
    api_key: str


@dataclass(frozen=True, slots=True)
class ClusterState:
    """Paths and keys of one local cluster."""

    folder: Path
    keys: Keys

    @property
    def cluster_file(self) -> Path:
        """Where every process of the cluster reads its settings."""
        return self.folder / "cluster.toml"

    @property
    def kvd_socket(self) -> Path:
        """Where replicas find the host's shared KV memory."""
        return self.folder / "kvd.sock"

    def log(self, name: str) -> Path:
        """The log of one child."""
        return self.folder / "logs" / f"{name}.log"


def default_folder(cluster: str) -> Path:
    """$WARMROUTE_STATE, else the user's state folder."""
    given = os.environ.get("WARMROUTE_STATE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "warmroute" / cluster


def sha256_hex(key: str) -> str:
    """How keys are kept at rest."""
    return hashlib.sha256(key.encode()).hexdigest()


def _write_private(path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    temporary.replace(path)


def read_keys(folder: Path) -> Keys:
    """The keys of a cluster that was started before. Raises CommandError."""
    try:
        return msgspec.json.decode((folder / "keys.json").read_bytes(), type=Keys)
    except (FileNotFoundError, NotADirectoryError):
        raise CommandError(f"no cluster in {folder}: start one with `warmroute up`") from None
    except OSError as error:
        raise CommandError(f"{folder / 'keys.json'}: {error.strerror}") from None
    except msgspec.MsgspecError:
        raise CommandError(
            f"{folder / 'keys.json'} is damaged: remove it to make new keys"
        ) from None


def cluster_of(folder: Path) -> ClusterConfig:
    """The settings of a cluster that was started before. Raises CommandError and ConfigError."""
    file = folder / "cluster.toml"
    if not file.exists():
        raise CommandError(f"no cluster in {folder}: start one with `warmroute up`")
    return load_cluster(file)


def open_state(folder: Path) -> ClusterState:
    """The state folder, made where it is missing. Raises CommandError.

    A folder that holds other things is refused: it would be closed to everybody but its owner.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if foreign := sorted({entry.name for entry in folder.iterdir()} - OWN_ENTRIES):
            raise CommandError(f"{folder} is no state folder: it holds {foreign[0]}")
        (folder / "logs").mkdir(exist_ok=True)
        folder.chmod(0o700)
        return _with_keys(folder)
    except OSError as error:
        raise CommandError(f"can't use the state folder {folder}: {error.strerror}") from error


def _with_keys(folder: Path) -> ClusterState:
    path = folder / "keys.json"
    if not path.exists():
        keys = Keys(
            secret=secrets.token_hex(32),
            admin_key=f"wr-admin-{secrets.token_urlsafe(24)}",
            api_key=f"sk-wr-{secrets.token_urlsafe(24)}",
        )
        _write_private(path, msgspec.json.encode(keys))
    return ClusterState(folder, read_keys(folder))


def lock(state: ClusterState) -> int:
    """Hold the folder for this process; released by the kernel, however it ends.

    Raises CommandError when another `warmroute up` holds it.
    """
    descriptor = os.open(state.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise CommandError(
            f"another `warmroute up` runs in {state.folder}: stop it, or give this one a --state "
            "and a --port of its own"
        ) from None
    return descriptor


def held(folder: Path) -> bool:
    """Whether a `warmroute up` runs there, ready or not."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def write_cluster(state: ClusterState, config: ClusterConfig) -> None:
    """The cluster file that all children read."""
    _write_private(state.cluster_file, to_toml(config).encode())
