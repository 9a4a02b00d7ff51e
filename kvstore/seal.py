"""Blocks that only holders of the cluster's secret can read: for stores that others may look into.

Header and payload are sealed together by AES-256-GCM under a key of the block's owner. What the
store sees is a block like any other, whose tokens are zeros: key, namespace, owner and times stay
readable, so that the store can find, expire and purge it; they are bound to what is sealed.
"""

from __future__ import annotations

import os
import struct
from dataclasses import replace

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from events.secrets import seal_key
from kvstore.block import BlockHeader, decode, encode, encoded_bytes
from kvstore.errors import BadBlockError, Reason
from kvstore.layout import Layout
from kvstore.sums import layer_sums

NONCE_BYTES = 12
TAG_BYTES = 16


class Sealer:
    """Of blocks of one layout, in one cluster. Threads may share it."""

    def __init__(self, secret: bytes, layout: Layout, mac_key: bytes) -> None:
        self._secret = secret
        self._layout = layout
        self._mac_key = mac_key
        self._header_bytes = encoded_bytes(layout.block_tokens, layout.layers)
        self._used_bytes = NONCE_BYTES + self._header_bytes + layout.payload_bytes + TAG_BYTES
        self.sealed_bytes = -(-self._used_bytes // layout.layers) * layout.layers
        """How long a sealed payload is: a number of equal layers, like any other."""

    def seal(self, header: bytes, payload: memoryview) -> tuple[bytes, bytes]:
        """Header and payload as the store gets them. Raises BadBlockError where these are none of
        this layout."""
        plain = decode(header)
        if (len(header), payload.nbytes) != (self._header_bytes, self._layout.payload_bytes):
            raise BadBlockError(Reason.SIZE)
        nonce = os.urandom(NONCE_BYTES)
        data = self._cipher(plain).encrypt(nonce, header + payload, _bound(plain))
        sealed = (nonce + data).ljust(self.sealed_bytes, b"\0")
        shown = replace(
            plain,
            block=replace(plain.block, tokens=bytes(len(plain.block.tokens))),
            payload_bytes=len(sealed),
            sums=layer_sums(sealed, plain.layers),
        )
        return encode(shown, self._mac_key), sealed

    def unseal(self, header: bytes, sealed: memoryview, into: memoryview) -> bytes:
        """The header as it was; the payload lies in `into` then. Raises BadBlockError, and nothing
        has been written."""
        shown = decode(header)
        if into.nbytes != self._layout.payload_bytes or sealed.nbytes != self.sealed_bytes:
            raise BadBlockError(Reason.SIZE)
        nonce, data = bytes(sealed[:NONCE_BYTES]), sealed[NONCE_BYTES : self._used_bytes]
        try:
            plain = self._cipher(shown).decrypt(nonce, data, _bound(shown))
        except InvalidTag:
            raise BadBlockError(Reason.SEAL) from None
        payload = np.frombuffer(plain, np.uint8, offset=self._header_bytes)
        np.copyto(np.frombuffer(into, np.uint8), payload)
        return plain[: self._header_bytes]

    def _cipher(self, header: BlockHeader) -> AESGCM:
        return AESGCM(seal_key(self._secret, header.block.scope))


def _bound(header: BlockHeader) -> bytes:
    """What the store sees and may not change."""
    block = header.block
    times = struct.pack("<IQQ", block.index, header.created_ms, header.expires_ms)
    return b"".join((block.key, block.parent, block.namespace, block.scope, header.layout, times))
