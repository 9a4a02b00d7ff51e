"""Pools: the replicas that one chain of block keys serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from events.load import OWN_ENGINE
from kvstore.identity import Namespace
from router.fleet.member import Member


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas with one fingerprint: one chain of block keys serves them all. Only our own ones can
    share the heads of prompts among tenants. `abilities` and `roles`: what at least one of them
    has."""

    name: str
    revision: str
    namespace: Namespace
    block_tokens: int
    context_tokens: int
    replicas: tuple[str, ...]
    public_prefixes: bool = True
    abilities: frozenset[str] = frozenset()
    roles: frozenset[str] = frozenset()


def grouped(members: Iterable[Member]) -> dict[str, Pool]:
    """Pools of the members that fit, the one with most linked replicas first."""
    groups: dict[str, list[Member]] = {}
    for member in members:
        if not member.misfits:
            groups.setdefault(member.pool, []).append(member)
    order = sorted(groups, key=lambda name: (-sum(m.linked for m in groups[name]), name))
    return {name: _pool(name, groups[name]) for name in order}


def leaders(pools: Mapping[str, Pool]) -> dict[str, str]:
    """The first pool of each revision, of those in their order."""
    return {pool.revision: name for name, pool in reversed([*pools.items()])}


def _pool(name: str, members: list[Member]) -> Pool:
    hellos = [member.hello for member in members]
    return Pool(
        name=name,
        revision=members[0].revision,
        namespace=Namespace.of_hello(hellos[0]),
        block_tokens=hellos[0].layout.block_tokens,
        context_tokens=min(hello.context_tokens for hello in hellos),
        replicas=tuple(sorted(member.replica for member in members)),
        public_prefixes=any(hello.engine == OWN_ENGINE for hello in hellos),
        abilities=frozenset(word for hello in hellos for word in hello.abilities),
        roles=frozenset(hello.role for hello in hellos),
    )
