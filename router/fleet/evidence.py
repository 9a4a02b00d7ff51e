"""Whether what a replica tells of its cache can be so: alarms that come with time, and proofs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from events.load import OWN_ENGINE
from kvstore.identity import KeyChain
from router.fleet.member import Member, Proof
from router.fleet.stores import store_named
from router.locality.falsehits import FalseHits
from router.locality.index import DigestIndex
from router.telemetry.alarms import Alarms

BUS_SILENT = "bus_silent"
BUS = "bus"
"""Whom that alarm is about."""

NO_EVENTS_AFTER_S = 9.0
"""Named within ten seconds, whenever the check comes."""
STALE_DIGEST_AFTER_S = 5.0
PROOF_AFTER_S = 1.5
PROBE_EVERY_S = 1.0


class Evidence:
    """Reads the index, writes alarms and the members' trust."""

    def __init__(self, index: DigestIndex, alarms: Alarms) -> None:
        self.false_hits = FalseHits()
        self._index = index
        self._alarms = alarms
        self._next_probe_s = 0.0
        self._bus_silent_at_s = -math.inf

    def expect_shown(
        self, member: Member, chain: KeyChain, public_cut_blocks: int, now_s: float
    ) -> None:
        """This prompt was just computed there: its head must show in the digest before long. One
        such proof per replica is under way at a time."""
        if member.proof is None and chain.blocks:
            private = 0 < public_cut_blocks < chain.blocks
            blocks = chain.halves()[[0, public_cut_blocks] if private else [0]]
            shown = self._index.holds(member.replica, blocks)
            member.proof = Proof(blocks, now_s + PROOF_AFTER_S, shown, _computed_tokens(member))

    def look(self, member: Member) -> None:
        """Its digest has changed: what it shows now may be gone when the proof is due."""
        proof = member.proof
        if proof is not None and not proof.shown.all():
            proof.shown |= self._index.holds(member.replica, proof.blocks)

    def probe(self, now_s: float) -> None:
        """Measure false hits: beside the heartbeats, which nobody waits for."""
        if now_s >= self._next_probe_s:
            self._next_probe_s = now_s + PROBE_EVERY_S
            self.false_hits.probe(self._index)

    def listen(self, members: Collection[Member], now_s: float) -> None:
        """Where links stand and the bus brings nothing of anybody, the bus is at fault."""
        alive = [member for member in members if self._lives(member)]
        silent = bool(alive) and all(member.unheard(now_s) for member in alive)
        self._alarms.set(
            silent, BUS_SILENT, BUS, "links stand, but the bus brings nothing of any replica"
        )
        if silent:
            self._bus_silent_at_s = now_s

    def _lives(self, member: Member) -> bool:
        told = member.load is not None and member.hello.engine == OWN_ENGINE
        return told and member.linked and not self._alarms.active("replica_stalled", member.replica)

    def check(self, member: Member, now_s: float, leading: Mapping[str, str]) -> None:
        """Raise and clear what time alone decides. `leading`: each revision's largest pool; whoever
        stands beside it shares no block with it, and should know."""
        beside = member.linked and leading.get(member.revision) != member.pool
        self._alarms.set(
            beside,
            "other_pool",
            member.replica,
            "shares no cached prompt: its block_tokens or dtype are not those of most replicas",
        )
        unknown_s = member.unknown_since_s
        since_s = None if unknown_s is None else max(unknown_s, self._bus_silent_at_s)
        silent = since_s is not None and now_s - since_s >= NO_EVENTS_AFTER_S
        silent = silent and member.hello.digests
        self._alarms.set(
            silent, "no_events", member.replica, "alive, but its cache digest never came"
        )
        stale = unknown_s is None and now_s - member.digest_at_s >= STALE_DIGEST_AFTER_S
        self._alarms.set(stale, "stale_digest", member.replica, "no word of its cache for seconds")

        short = member.trust.fetches.short(now_s)
        names = ", ".join(store_named(member, tier) for tier in short)
        self._alarms.set(
            bool(short), "loads_fall_short", member.replica, f"{names} gives less than is shown"
        )
        if member.proof is not None and now_s >= member.proof.due_s:
            self._prove(member, member.proof)

    def _prove(self, member: Member, proof: Proof) -> None:
        """Only a digest that is known to be newer than the prompt can tell, and nothing is missed
        that may have come and gone between two words of it: where few blocks are there, as many
        as can be evicted are soon computed."""
        member.proof = None
        if (
            not self._index.known(member.replica)
            or member.digest_at_s < proof.due_s - PROOF_AFTER_S
        ):
            return
        if not proof.shown.all() and _turned_over(member, proof):
            return
        head, *private = map(bool, proof.shown)
        member.trust.confirm(head, private[0] if private else None)
        self._alarms.set(
            member.trust.nothing_matches,
            "nothing_matches",
            member.replica,
            "what it computed never shows in its digest: the two ends name blocks differently",
        )
        self._alarms.set(
            member.trust.salt_unknown,
            "salt_unknown",
            member.replica,
            "public heads show in its digest, tenants' own blocks never do",
        )


def _computed_tokens(member: Member) -> int:
    load = member.load
    return 0 if load is None else load.prompt_tokens_total - load.cached_tokens_total


def _turned_over(member: Member, proof: Proof) -> bool:
    """Whether since then half as much was computed as the replica could evict for it."""
    load = member.load
    if load is None:
        return False
    block_tokens = member.hello.layout.block_tokens
    computed_blocks = (_computed_tokens(member) - proof.computed_tokens) / block_tokens
    return computed_blocks >= (load.free_blocks + load.cached_blocks) / 2
