"""What a cluster file says of a replica."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import ConfigError, model_path
from configs.schema import ClusterConfig, ModelConfig, ReplicaConfig, RevisionConfig

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
