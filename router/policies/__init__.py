"""Rules that choose among candidates: ours, and one short file for each peer's rule."""

from __future__ import annotations

from collections.abc import Callable

from router.policies.base import Policy
from router.policies.block_cost import BlockCost
from router.policies.bounded_hash import BoundedHash
from router.policies.least_load import LeastLoad
from router.policies.longest_prefix import LongestPrefix
from router.policies.power_of_two import PowerOfTwo
from router.policies.preble import Preble
from router.policies.random import Random
from router.policies.round_robin import RoundRobin
from router.policies.warmroute import Warmroute
from router.policies.weighted import Weighted

POLICIES: dict[str, Callable[[], Policy]] = {
    policy.name: policy
    for policy in (
        Warmroute,
        RoundRobin,
        Random,
        LeastLoad,
        PowerOfTwo,
        BoundedHash,
        LongestPrefix,
        BlockCost,
        Weighted,
        Preble,
    )
}


def make_policy(name: str) -> Policy:
    """A fresh policy. Raises ValueError, naming what there is, on an unknown name."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy '{name}'; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
