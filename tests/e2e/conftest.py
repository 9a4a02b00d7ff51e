"""One small cluster for all end-to-end tests: real processes, a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from configs.model.weights import open_weights
from tests.e2e.up import Up
from tests.fakes.adapters import write_adapter

MODEL = "tiny"
ADAPTER = "tiny/pirate"


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """What the cluster serves as ADAPTER."""
    return write_adapter(tmp_path_factory.mktemp("pirate"), open_weights(tiny_model).shape)


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, adapter: Path) -> Iterator[Up]:
    """A cluster that the tests share; they leave it running and well."""
    state = tmp_path_factory.mktemp("state")
    cluster = Up(
        state,
        "--port",
        "0",
        "--model",
        str(tiny_model),
        "--model-name",
        MODEL,
        "--dtype",
        "float32",
        "--lora",
        f"{ADAPTER}={adapter}",
    )
    try:
        cluster.wait_ready().look()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def client(up: Up) -> Iterator[OpenAI]:
    """The official client, without retries of its own."""
    with OpenAI(base_url=f"{up.url}/v1", api_key=up.key, max_retries=0, timeout=60) as client:
        yield client
