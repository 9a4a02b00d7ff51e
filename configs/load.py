"""Reading a cluster file: TOML, then environment, then flags."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from configs.schema import ClusterConfig, ReplicaConfig

ENV_PREFIX = "WARMROUTE_"


class ConfigError(ValueError):
    """A setting that can't be used; the message says which and why."""


def _overrides(environ: Mapping[str, str]) -> dict[str, str]:
    """WARMROUTE_ROUTER__PORT=9000 becomes {"router.port": "9000"}."""
    return {
        name.removeprefix(ENV_PREFIX).lower().replace("__", "."): value
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and "__" in name
    }


def _apply(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for parent in parents:
        branch = tree.setdefault(parent, {})
        if not isinstance(branch, dict):
            raise ConfigError(f"{dotted}: '{parent}' is not a section")
        tree = branch
    tree[leaf] = value


def load_cluster(
    path: Path,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> ClusterConfig:
    """The settings of a cluster. `flags` maps dotted names to values and wins over everything.

    Raises ConfigError.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    for dotted, value in _overrides(os.environ if environ is None else environ).items():
        _apply(tree, dotted, value)
    for dotted, value in (flags or {}).items():
        _apply(tree, dotted, value)
    try:
        config = msgspec.convert(tree, ClusterConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    check_adapters(config)
    return config


def replica_of(config: ClusterConfig, replica_id: str) -> ReplicaConfig:
    """The section of one replica. Raises ConfigError when there is none."""
    for replica in config.replicas:
        if replica.id == replica_id:
            return replica
    raise ConfigError(f"no replica '{replica_id}' in the cluster file")


def model_path(config: ClusterConfig, replica: ReplicaConfig) -> Path:
    """Where the weights of its revision lie. Raises ConfigError when there is no such revision."""
    paths = {"": config.model.path, **{of.name: of.path for of in config.revisions}}
    if replica.revision not in paths:
        raise ConfigError(f"replica '{replica.id}': no revision '{replica.revision}'")
    return Path(paths[replica.revision])


def check_adapters(config: ClusterConfig) -> None:
    """Raises ConfigError on names that can't be told apart, or that serve nothing."""
    names = [config.model.name, *(of.name for of in config.adapters)]
    twice = sorted(name for name in set(names) if names.count(name) > 1)
    if twice:
        raise ConfigError(f"'{twice[0]}' names more than one model or adapter")
    known = {replica.id for replica in config.replicas}
    for of in config.adapters:
        if strangers := sorted(set(of.replicas) - known):
            raise ConfigError(f"adapter '{of.name}': no replica '{strangers[0]}'")


def adapter_paths(config: ClusterConfig, replica: ReplicaConfig) -> dict[str, Path]:
    """The folders of the adapters that a replica serves, by name: those of the model itself, not of
    another revision."""
    if replica.revision:
        return {}
    serves = (of for of in config.adapters if not of.replicas or replica.id in of.replicas)
    return {of.name: Path(of.path) for of in serves}


def to_toml(config: ClusterConfig) -> str:
    """The cluster file of `config`. TOML has no null: what is not set is left out."""
    tree: dict[str, Any] = _less_nulls(msgspec.to_builtins(config))
    return tomli_w.dumps(tree)


def _less_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _less_nulls(each) for key, each in value.items() if each is not None}
    return [_less_nulls(each) for each in value] if isinstance(value, (list, tuple)) else value
