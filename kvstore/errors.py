"""What can be wrong with stored KV. A wrong block is a miss, counted by its reason.

WarmrouteError
  BadBlockError    the bytes are not the block that they claim to be
  StoreError       a tier can't be started, reached or used
    AbandonedError   a call was given up by ourselves
"""

from __future__ import annotations

from enum import StrEnum

from events.errors import WarmrouteError


class Reason(StrEnum):
    """Why a stored block was refused; the label of a counter."""

    TRUNCATED = "truncated"
    MAGIC = "magic"
    VERSION = "version"
    MALFORMED = "malformed"
    HEADER_SUM = "header_sum"
    MAC = "mac"
    SEAL = "seal"
    KEY = "key"
    PARENT = "parent"
    NAMESPACE = "namespace"
    INDEX = "index"
    TOKENS = "tokens"
    LAYOUT = "layout"
    EXPIRED = "expired"
    SIZE = "size"
    PAYLOAD = "payload"
    RECOMPUTED = "recomputed"


class BadBlockError(WarmrouteError):
    """The bytes are not the block that they claim to be."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(f"not a usable block: {reason}")
        self.reason = reason


class StoreError(WarmrouteError):
    """A tier can't be started, reached or used."""


class AbandonedError(StoreError):
    """A call was given up by ourselves: nothing is wrong with the other side."""
