"""KV cache events as vLLM and SGLang publish them over ZMQ: their words, both forms of the wire.

A batch is the msgpack array [time, events, data parallel rank]. An event is an array that begins
with its type (older vLLM, SGLang), or a map with a "type" (vLLM 0.32): both are read. Whatever else
an event holds is ignored. Token ids are in it in clear: these messages stay on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from events.errors import WireError

MAX_KV_BATCH_BYTES = 64 * 1024 * 1024
SEQ_BYTES = 8
END_OF_REPLAY = b"\xff" * SEQ_BYTES
DEVICE = "GPU"
"""What vLLM calls the engine's own tier, whatever the device is."""

EngineHash = int | bytes
"""How an engine names a block; another one may name it otherwise."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks of one sequence. `parent` is None for the head of a prompt.

    `extra_keys`: per block what else its hash depends on (salt, images), None for nothing, or where
    the engine does not say. `adapter`: the LoRA adapter that they were computed with, or empty.
    """

    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    token_ids: tuple[int, ...]
    block_size: int
    extra_keys: tuple[Any, ...]
    adapter: str = ""
    medium: str = DEVICE
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """One copy of each is gone."""

    hashes: tuple[EngineHash, ...]
    medium: str = DEVICE
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """Nothing is cached any more."""


KVEvent = BlocksStored | BlocksRemoved | BlocksCleared

_ARRAY_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}

_decoder = msgspec.msgpack.Decoder()
_encoder = msgspec.msgpack.Encoder()


class _Stored(msgspec.Struct):
    block_hashes: list[int | bytes]
    token_ids: list[int]
    block_size: int
    parent_block_hash: int | bytes | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    medium: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class _Removed(msgspec.Struct):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class _WireStored(msgspec.Struct, tag_field="type", tag="BlockStored", omit_defaults=True):
    """As vLLM 0.32 writes it; the order of the fields is its own."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _WireRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class _WireCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


def decode_batch(payload: bytes) -> list[KVEvent]:
    """The events of one message. Raises WireError, which quotes nothing of it."""
    if len(payload) > MAX_KV_BATCH_BYTES:
        raise WireError(f"KV events of {len(payload)} bytes are over the limit")
    try:
        batch = _decoder.decode(payload)
        if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
            raise WireError("this is no batch of KV events")
        events = [_event(*_named(raw)) for raw in batch[1]]
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise WireError(f"malformed KV events ({type(error).__name__})") from None
    return [event for event in events if event is not None]


def encode_batch(time_s: float, events: list[KVEvent]) -> bytes:
    """One message in the form of vLLM 0.32. Hashes must be integers of 64 bits."""
    return _encoder.encode([time_s, [_to_wire(event) for event in events], 0])


def _named(raw: object) -> tuple[str, dict[str, Any]]:
    """(type, fields) of one event of either form."""
    if isinstance(raw, dict):
        return str(raw.get("type")), raw
    if isinstance(raw, list) and raw and isinstance(raw[0], str):
        names = _ARRAY_FIELDS.get(raw[0], ())
        return raw[0], dict(zip(names, raw[1:], strict=False))
    raise WireError("this is no KV event")


def _event(kind: str, fields: dict[str, Any]) -> KVEvent | None:
    """None for a type that is not known here."""
    if kind == "BlockStored":
        return _stored(msgspec.convert(fields, _Stored))
    if kind == "BlockRemoved":
        removed = msgspec.convert(fields, _Removed)
        return BlocksRemoved(
            tuple(removed.block_hashes), removed.medium or DEVICE, removed.group_idx or 0
        )
    return BlocksCleared() if kind == "AllBlocksCleared" else None


def _stored(stored: _Stored) -> BlocksStored:
    blocks = len(stored.block_hashes)
    extra = stored.extra_keys or [None] * blocks
    if len(extra) != blocks:
        raise WireError("KV events with other extra keys than blocks")
    if stored.block_size < 1 or len(stored.token_ids) != blocks * stored.block_size:
        raise WireError("KV events with other tokens than blocks")
    return BlocksStored(
        hashes=tuple(stored.block_hashes),
        parent=stored.parent_block_hash,
        token_ids=tuple(stored.token_ids),
        block_size=stored.block_size,
        extra_keys=tuple(extra),
        adapter=stored.lora_name or ("" if stored.lora_id is None else str(stored.lora_id)),
        medium=stored.medium or DEVICE,
        group=stored.group_idx or 0,
    )


def _to_wire(event: KVEvent) -> msgspec.Struct:
    if isinstance(event, BlocksCleared):
        return _WireCleared()
    hashes = [value for value in event.hashes if isinstance(value, int)]
    if isinstance(event, BlocksRemoved):
        return _WireRemoved(hashes, event.medium, event.group)
    return _WireStored(
        block_hashes=hashes,
        parent_block_hash=event.parent if isinstance(event.parent, int) else None,
        token_ids=list(event.token_ids),
        block_size=event.block_size,
        lora_id=None,
        medium=event.medium,
        lora_name=event.adapter or None,
        extra_keys=list(event.extra_keys),
        group_idx=event.group,
        kv_cache_spec_kind="full_attention",
    )
