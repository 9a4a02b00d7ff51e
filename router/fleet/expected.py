"""What a replica's hello must say before anything is routed to it.

A mismatch here would give zero matches, or wrong text, without any error: so it is refused loudly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from events.digest import check_shape
from events.errors import WireError
from events.load import DigestShape, ReplicaHello
from kvstore.identity import HASH_VERSION, key_id

MAIN = "main"
"""The revision that the cluster file's `model` names."""

BRIEF_CHARS = 24

if TYPE_CHECKING:
    from configs.model.card import ModelCard
    from configs.schema import ClusterConfig


@dataclass(frozen=True, slots=True)
class Expected:
    """The router's own view of its model and cluster. Fingerprints are hex digests.

    `block_tokens` holds the block sizes that the cluster file names; empty accepts any. `adapters`:
    names and content digests; a replica need not serve them all.
    """

    model: str
    weights: str
    tokenizer: str
    template: str
    key_id: str
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: frozenset[int] = frozenset()
    hash_version: str = HASH_VERSION
    adapters: frozenset[tuple[str, str]] = frozenset()

    @classmethod
    def like(cls, hello: ReplicaHello) -> Expected:
        """What just such a replica fits, with blocks of any size: where there is no model file."""
        return cls(
            model=hello.model,
            weights=hello.weights,
            tokenizer=hello.tokenizer,
            template=hello.template,
            key_id=hello.key_id,
            layers=hello.layout.layers,
            kv_heads=hello.layout.kv_heads,
            head_dim=hello.layout.head_dim,
        )

    @classmethod
    def of(
        cls, card: ModelCard, config: ClusterConfig, adapters: Mapping[str, str] | None = None
    ) -> Expected:
        """From the router's own model file, cluster file and adapters (digests by name). Raises
        ValueError on a bad secret."""
        return cls(
            model=config.model.name,
            weights=card.weights_fingerprint,
            tokenizer=card.tokenizer_fingerprint,
            template=card.template_fingerprint,
            key_id=key_id(bytes.fromhex(config.secret)),
            layers=card.shape.layers,
            kv_heads=card.shape.kv_heads,
            head_dim=card.shape.head_dim,
            block_tokens=frozenset(
                member.block_tokens for member in (*config.replicas, *config.backends)
            ),
            adapters=frozenset((adapters or {}).items()),
        )

    def misfits(self, hello: ReplicaHello) -> dict[str, str]:
        """The alarms that this hello deserves, by name, with what it says and what is wanted; empty
        when the replica fits."""
        layout = hello.layout
        geometry = layout.layers, layout.kv_heads, layout.head_dim
        found = {
            name: f"it says {_brief(said)}, wanted is {_brief(wanted)}"
            for name, said, wanted in (
                ("model_mismatch", hello.model, self.model),
                ("weights_mismatch", hello.weights, self.weights),
                ("tokenizer_mismatch", hello.tokenizer, self.tokenizer),
                ("template_mismatch", hello.template, self.template),
                ("key_mismatch", hello.key_id, self.key_id),
                ("hash_version_mismatch", hello.hash_version, self.hash_version),
                ("layout_mismatch", geometry, (self.layers, self.kv_heads, self.head_dim)),
            )
            if said != wanted
        }
        tokens, sizes = layout.block_tokens, sorted(self.block_tokens)
        if tokens <= 0 or (sizes and tokens not in sizes):
            wanted = " or ".join(map(str, sizes)) or "a positive number"
            found["block_size_mismatch"] = f"it says {tokens} tokens, wanted is {wanted}"
        if not _usable_shape(hello.digest):
            found["digest_shape_refused"] = f"{hello.digest.bits} bits, {hello.digest.k} hashes"
        return found

    def strangers(self, hello: ReplicaHello) -> list[str]:
        """Those of its adapters that have another content than the ones known here by these names:
        nobody is sent there for them, and for all else it is as good as any."""
        known = dict(self.adapters)
        return [
            note.name for note in hello.adapters if known.get(note.name, note.digest) != note.digest
        ]


@dataclass(frozen=True, slots=True)
class Expectations:
    """The main model's, and those of other revisions by their names."""

    main: Expected
    revisions: Mapping[str, Expected] = field(default_factory=dict)

    def judge(self, hello: ReplicaHello) -> tuple[str, dict[str, str]]:
        """The revision that the hello fits, and no alarms; or the one that it fits best, and the
        alarms that it deserves."""
        misfits = {MAIN: self.main.misfits(hello)}
        misfits.update((name, of.misfits(hello)) for name, of in self.revisions.items())
        best = min(misfits, key=lambda name: len(misfits[name]))
        return best, misfits[best]

    def of(self, revision: str) -> Expected:
        """What `judge` measured by."""
        return self.main if revision == MAIN else self.revisions[revision]


def _brief(value: object) -> str:
    """What came from the wire, for a log and an alarm: bounded, and on one line."""
    text = str(value)
    return repr(text if len(text) <= BRIEF_CHARS else f"{text[:BRIEF_CHARS]}...")


def _usable_shape(shape: DigestShape) -> bool:
    try:
        check_shape(shape)
    except WireError:
        return False
    return True


def pool_name(hello: ReplicaHello) -> str:
    """One name per fingerprint: replicas of one pool share one chain of block keys."""
    layout = hello.layout
    geometry = f"{layout.layers}x{layout.kv_heads}x{layout.head_dim}"
    return "/".join(
        (
            hello.model,
            hello.weights[:16],
            hello.tokenizer[:8] + hello.template[:8],
            f"{layout.dtype}-{geometry}-b{layout.block_tokens}-{layout.rope}",
            f"{hello.hash_version}-{hello.key_id}",
        )
    )
