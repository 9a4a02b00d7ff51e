"""What a cluster file says of a replica."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import ConfigError, load_cluster, model_path
from configs.schema import (
    ClusterConfig,
    KvConfig,
    ModelConfig,
    ReplicaConfig,
    RevisionConfig,
    RouterConfig,
    Section,
    TenantPolicy,
)

CLUSTER = ClusterConfig(
    secret="00" * 32,
    model=ModelConfig(path="old.gguf"),
    revisions=(RevisionConfig(name="next", path="new.gguf"),),
)


def test_a_replica_serves_the_model_or_the_revision_that_it_names() -> None:
    assert model_path(CLUSTER, ReplicaConfig(id="r0")) == Path("old.gguf")
    assert model_path(CLUSTER, ReplicaConfig(id="r1", revision="next")) == Path("new.gguf")
    with pytest.raises(ConfigError, match="no revision 'lost'"):
        model_path(CLUSTER, ReplicaConfig(id="r2", revision="lost"))


def test_a_file_that_cannot_be_read_is_named_with_what_is_wrong(tmp_path: Path) -> None:
    binary = tmp_path / "cluster.toml"
    binary.write_bytes(b"\xff")
    for file, wrong in ((binary, "utf-8"), (tmp_path / "lost", "No such file"), (tmp_path, "Is a")):
        with pytest.raises(ConfigError, match=f"^{file}: .*{wrong}") as refused:
            load_cluster(file, environ={})
        assert str(refused.value).count(str(file)) == 1


@pytest.mark.parametrize(
    "setting",
    [
        "router.port = 70000",
        "router.max_body_bytes = -1",
        "router.max_connections = 0",
        "router.request_timeout_s = nan",
        "router.first_token_timeout_s = inf",
        "router.slow_reader_s = 0",
        "router.replicate_share = 1.5",
        "router.retries = -1",
        "router.max_queued_requests = 0",
        "router.admin_key_sha256 = 'not a digest'",
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(setting: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(f'secret = "{"00" * 32}"\n{setting}\n[model]\npath = "m.gguf"\n')
    with pytest.raises(ConfigError, match=setting.split(" ")[0]):
        load_cluster(file, environ={})


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        (RouterConfig, "max_body_bytes", -1),
        (RouterConfig, "keepalive_s", float("nan")),
        (RouterConfig, "max_connections", True),
        (RouterConfig, "retries", 1.5),
        (RouterConfig, "admin_key_sha256", "ff"),
        (KvConfig, "host_bytes", 0),
        (TenantPolicy, "weight", float("inf")),
    ],
)
def test_a_section_that_is_made_in_python_has_the_same_bounds(
    section: type[Section], name: str, value: object
) -> None:
    with pytest.raises(ValueError, match=f"{name}: {value!r} is not within its bounds"):
        section(**{name: value})
