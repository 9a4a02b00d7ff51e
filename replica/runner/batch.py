"""From a plan to the tensors of one forward pass. Plain numpy on the host, then one copy each.

Rows with one new token come first, so that a backend may treat them as one dense batch. Rows of one
adapter lie side by side, and so do all that have one; `order` leads back to the plan's rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np
import torch
from torch import Tensor

from replica.lora.apply import Span
from replica.lora.weights import AdapterWeights
from replica.sched.plan import PlanRow

NO_ADAPTERS: Mapping[str, AdapterWeights] = {}


class PlanError(ValueError):
    """A plan that can't be executed: a broken invariant of whoever made it."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens in R rows, S of which are sampled; integer tensors.

    token_ids, positions, slots: int64 [T]; a slot is block * block_tokens + offset in the block.
    block_tables: int32 [R, W], filled up with the dump block.
    starts: int32 [R + 1], where each row's tokens begin. contexts: int32 [R], tokens of each row
    that can be attended to after this pass. host_starts and host_contexts: the same in host
    memory, so that a backend can know its shapes without waiting for the device.
    last: int64 [R], each row's last token. singles: how many rows, the first ones, have one token
    in the plan. spans: which of them compute with an adapter.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    starts: Tensor
    contexts: Tensor
    host_starts: Tensor
    host_contexts: Tensor
    last: Tensor
    singles: int
    spans: tuple[Span, ...] = ()

    @property
    def rows(self) -> int:
        """How many rows there are; known on the host."""
        return len(self.host_contexts)

    def last_only(self) -> ForwardBatch:
        """The same rows, each reduced to its last token."""
        starts = torch.arange(self.rows + 1, dtype=torch.int32)
        on_device = starts.to(self.starts.device, non_blocking=True)
        return ForwardBatch(
            token_ids=self.token_ids[self.last],
            positions=self.positions[self.last],
            slots=self.slots[self.last],
            block_tables=self.block_tables,
            starts=on_device,
            contexts=self.contexts,
            host_starts=starts,
            host_contexts=self.host_contexts,
            last=on_device[:-1].long(),
            singles=self.singles,
        )


def row_order(rows: Sequence[PlanRow]) -> list[int]:
    """Indices of the plan's rows in batch order: single tokens first, those with an adapter at
    their end; then the others, those with one at their begin; by adapter, else as planned."""

    def place(at: int) -> tuple[bool, bool, str]:
        long, adapter = len(rows[at].token_ids) > 1, rows[at].adapter
        return long, long != bool(adapter), adapter

    return sorted(range(len(rows)), key=place)


def _spans(
    rows: Sequence[PlanRow], starts: np.ndarray, adapters: Mapping[str, AdapterWeights]
) -> tuple[Span, ...]:
    """Runs of rows with the same adapter."""
    spans, first = [], 0
    for name, run in groupby(rows, key=lambda row: row.adapter):
        last = first + len(list(run))
        if name and name not in adapters:
            raise PlanError(f"adapter '{name}' is not in memory")
        if name:
            tokens = slice(int(starts[first]), int(starts[last]))
            spans.append(Span(slice(first, last), tokens, adapters[name]))
        first = last
    return tuple(spans)


def _check(row: PlanRow, blocks: int, block_tokens: int, context_tokens: int) -> None:
    end = row.start + len(row.token_ids)
    if not row.token_ids or row.start < 0 or end > context_tokens:
        raise PlanError(f"child {row.child}: positions {row.start} to {end} can't be computed")
    if end > len(row.block_ids) * block_tokens:
        raise PlanError(f"child {row.child}: {len(row.block_ids)} blocks don't cover {end} tokens")
    if not 0 <= min(row.block_ids) <= max(row.block_ids) < blocks:
        raise PlanError(f"child {row.child}: a block id lies outside the pool")


def _block_tables(rows: Sequence[PlanRow], block_tokens: int, dump: int) -> np.ndarray:
    used = [-(-(row.start + len(row.token_ids)) // block_tokens) for row in rows]
    tables = np.full((len(rows), max(used)), dump, np.int32)
    for table, row, count in zip(tables, rows, used, strict=True):
        table[:count] = row.block_ids[:count]
    return tables


def build_batch(
    rows: Sequence[PlanRow],
    *,
    blocks: int,
    block_tokens: int,
    context_tokens: int,
    vocab: int,
    device: torch.device,
    adapters: Mapping[str, AdapterWeights] = NO_ADAPTERS,
) -> ForwardBatch:
    """The batch of `rows`, which must be in batch order. `blocks` is also the dump's id. `adapters`
    are those in memory.

    Raises PlanError.
    """
    for row in rows:
        _check(row, blocks, block_tokens, context_tokens)
    lengths = np.array([len(row.token_ids) for row in rows])
    first = np.array([row.start for row in rows])
    starts = np.concatenate(([0], np.cumsum(lengths)))
    tokens = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, starts[-1])
    if tokens.min() < 0 or tokens.max() >= vocab:
        raise PlanError("a token id lies outside the vocabulary")
    owner = np.repeat(np.arange(len(rows)), lengths)
    positions = np.arange(starts[-1]) - starts[owner] + first[owner]
    tables = _block_tables(rows, block_tokens, blocks)
    slots = tables[owner, positions // block_tokens] * block_tokens + positions % block_tokens
    host_starts = torch.from_numpy(starts.astype(np.int32))
    host_contexts = torch.from_numpy((first + lengths).astype(np.int32))

    def upload(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return ForwardBatch(
        token_ids=upload(tokens),
        positions=upload(positions),
        slots=upload(slots.astype(np.int64)),
        block_tables=upload(tables),
        starts=host_starts.to(device, non_blocking=True),
        contexts=host_contexts.to(device, non_blocking=True),
        host_starts=host_starts,
        host_contexts=host_contexts,
        last=upload(starts[1:] - 1),
        singles=int((lengths == 1).sum()),
        spans=_spans(rows, starts, adapters),
    )
