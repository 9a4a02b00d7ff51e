"""Which store a URL names, and that none that names nothing is taken."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.errors import StoreError
from kvstore.remote.build import build_tier

SECRET = bytes(32)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("valkey://:secret@127.0.0.1:1", "valkey"),
        ("rediss://127.0.0.1:1/2", "valkey"),
        ("s3://bucket/kv?endpoint=http://127.0.0.1:1&region=x", "s3"),
        ("peer://127.0.0.1:1", "peer"),
    ],
)
def test_a_store_that_is_not_there_yet_can_be_named(url: str, name: str) -> None:
    with closing(build_tier(url, secret=SECRET)) as tier:
        assert tier.caps.name == name
        assert not tier.caps.trusted


def test_a_folder(tmp_path: Path) -> None:
    with closing(build_tier(f"file://{tmp_path}/a%20b?max_bytes=4096", secret=SECRET)) as tier:
        assert tier.caps.max_value_bytes == 4096
        assert (tmp_path / "a b").is_dir()
    with closing(build_tier(f"file://{tmp_path}/deep/er", secret=SECRET)) as tier:
        assert tier.caps.max_value_bytes > 1024 * 1024


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/tmp/blocks",
        "http://:secret@host",
        "valkey://:secret@",
        "valkey://:secret@host/x",
        "file://host/folder",
        "file:///",
        "file:///x?max_bytes=many",
        "s3://",
        "peer://host",
        "peer://secret@host:1",
    ],
)
def test_a_url_that_names_no_store_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        build_tier(url, secret=SECRET)
    assert "secret" not in str(caught.value)


def test_a_peer_needs_a_real_secret() -> None:
    with pytest.raises(StoreError, match="16 bytes"):
        build_tier("peer://127.0.0.1:1", secret=b"short")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("kvstore.remote.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(StoreError, match=r"obstore is missing: pip install -e '\.\[s3\]'"):
        build_tier("s3://bucket", secret=SECRET)
