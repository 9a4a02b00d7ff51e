"""Sealing of what routers share, so that whoever reads the bus or its files learns nothing.

AES-256-GCM under a key of the cluster's secret; bound to the key that it is stored under.
"""

from __future__ import annotations

import hmac
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from events.errors import WireError

VERSION = b"\x01"
NONCE_BYTES = 12
NAME_BYTES = 16


class Seal:
    """`key` has 32 bytes and is used for nothing else."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cipher = AESGCM(key)

    def name(self, kind: str, name: str) -> str:
        """The stored key of a setting: its name can't be read off it."""
        digest = hmac.digest(self._key, f"{kind}\0{name}".encode(), "sha256")
        return f"{kind}.{digest[:NAME_BYTES].hex()}"

    def close(self, stored_key: str, value: bytes) -> bytes:
        """The sealed value."""
        nonce = os.urandom(NONCE_BYTES)
        return VERSION + nonce + self._cipher.encrypt(nonce, value, stored_key.encode())

    def open(self, stored_key: str, sealed: bytes) -> bytes:
        """The value. Raises WireError when it was not sealed with this key, for this place."""
        start = len(VERSION) + NONCE_BYTES
        if sealed[:1] != VERSION or len(sealed) < start:
            raise WireError("not a sealed value of this version")
        try:
            return self._cipher.decrypt(sealed[1:start], sealed[start:], stored_key.encode())
        except InvalidTag:
            raise WireError("a value that was sealed otherwise") from None
