"""What is derived from the cluster's secret, besides block keys: the link's word, a seal's key.

The secret itself never crosses a process border; each use gets its own derived value.
"""

from __future__ import annotations

import hashlib
import hmac

SECRET_BYTES = 32
TENANT_TAG_BYTES = 8


def parse_secret(text: str) -> bytes:
    """The `secret` of a cluster file, as bytes. Raises ValueError; the text is never quoted."""
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        raise ValueError("the cluster's secret must be written in hex") from None
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"the cluster's secret must have {SECRET_BYTES} bytes ({len(secret)} now)")
    return secret


def link_secret(cluster_secret: bytes) -> str:
    """What a router presents in its LinkHello: 64 hex digits."""
    return hmac.new(cluster_secret, b"wr-link-1", hashlib.sha256).hexdigest()


def block_mac_key(cluster_secret: bytes) -> bytes:
    """What replicas sign the headers of stored KV blocks with: 32 bytes."""
    return hmac.digest(cluster_secret, b"wr-block-mac-1", "sha256")


def seal_key(cluster_secret: bytes, scope: bytes) -> bytes:
    """What the stored KV blocks of one owner are sealed with: 32 bytes."""
    return hmac.digest(cluster_secret, b"wr-block-seal-1" + scope, "sha256")


def store_name(cluster_secret: bytes, url: str) -> str:
    """A name for a store that says nothing of its URL, which may hold a password: 16 hex digits."""
    return hmac.new(cluster_secret, b"wr-store-1" + url.encode(), hashlib.sha256).hexdigest()[:16]


def tenant_tag(cluster_secret: bytes, name: str) -> bytes:
    """What stands for a tenant's name on the bus: 8 bytes."""
    digest = hmac.digest(cluster_secret, b"wr-tenant-1\0" + name.encode(), "sha256")
    return digest[:TENANT_TAG_BYTES]


def registry_key(cluster_secret: bytes) -> bytes:
    """What routers seal their shared settings with: 32 bytes."""
    return hmac.digest(cluster_secret, b"wr-registry-1", "sha256")
