"""What the policy is to reach, and whether these figures show it: one row for each goal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tools.bench.book.scenarios import PUBLISHED_P90_S, Scenario
from tools.sim.settings import CLAIRVOYANT
from tools.sim.simulate import OURS

RATIO_SHARE = 0.98
CAPACITY_SHARE = 1.3
BOUND_SHARE = 1.1


@dataclass(frozen=True, slots=True)
class Goal:
    """`ours` against `theirs`, `whose` that is, and whether it is met."""

    where: str
    words: str
    ours: float
    theirs: float
    whose: str
    met: bool

    def row(self) -> list[str]:
        """Cells of a table."""
        share = self.ours / self.theirs if self.theirs else 0.0
        other = f"{self.theirs:.3f} ({self.whose})"
        return [
            *(self.where, self.words, f"{self.ours:.3f}", other),
            *(f"{share:.3f}", "yes" if self.met else "**no**"),
        ]


def goals(results: Sequence[tuple[Scenario, dict[str, Any]]]) -> list[Goal]:
    """Those that there are figures for."""
    found = {scenario.name: result["policies"] for scenario, result in results}
    return [
        goal
        for scenario, result in results
        for goal in _of(scenario, result["policies"], found.get(scenario.bound))
    ]


def _of(
    scenario: Scenario, policies: dict[str, Any], bound: dict[str, Any] | None
) -> Iterator[Goal]:
    peers = {name: f for name, f in policies.items() if name not in (OURS, CLAIRVOYANT)}
    if scenario.name.startswith("ladder-published"):
        yield _published(scenario, policies[OURS])
    if not scenario.mooncake or not peers:
        return
    if scenario.capacity_slo_s is None:
        yield from _at_load(scenario, policies, peers)
    else:
        yield _capacity(scenario, policies[OURS], peers, bound)


def _published(scenario: Scenario, ours: dict[str, Any]) -> Goal:
    p90_s = ours["ttft_p90_s"]
    words = "TTFT p90 not above the published one"
    return Goal(scenario.title, words, p90_s, PUBLISHED_P90_S, "llm-d", p90_s <= PUBLISHED_P90_S)


def _at_load(scenario: Scenario, policies: dict[str, Any], peers: dict[str, Any]) -> Iterator[Goal]:
    ours = policies[OURS]
    where, mean_s, cached = scenario.title, ours["ttft_mean_s"], ours["cached_token_ratio"]
    best = min(peers, key=lambda name: peers[name]["ttft_mean_s"])
    theirs = peers[best]["ttft_mean_s"]
    yield Goal(where, "mean TTFT below every peer's", mean_s, theirs, best, mean_s < theirs)
    best = max(peers, key=lambda name: peers[name]["cached_token_ratio"])
    theirs = peers[best]["cached_token_ratio"]
    words = f"cached-token ratio at least {RATIO_SHARE:g} of the best"
    yield Goal(where, words, cached, theirs, best, cached >= RATIO_SHARE * theirs)
    if CLAIRVOYANT in policies:
        theirs = policies[CLAIRVOYANT]["ttft_mean_s"]
        words = f"mean TTFT at most {BOUND_SHARE:g} of the omniscient one's"
        yield Goal(where, words, mean_s, theirs, CLAIRVOYANT, mean_s <= BOUND_SHARE * theirs)


def _capacity(
    scenario: Scenario, ours: dict[str, Any], peers: dict[str, Any], bound: dict[str, Any] | None
) -> Goal:
    best = max(peers, key=lambda name: peers[name]["capacity_load"])
    theirs, load = peers[best]["capacity_load"], ours["capacity_load"]
    words = f"capacity at least {CAPACITY_SHARE:g} of the best (on one trace; on none below it)"
    if bound is not None:
        words += f"; {bound[OURS]['capacity_load']:.3f} where nothing is ever evicted"
    return Goal(scenario.title, words, load, theirs, best, load >= CAPACITY_SHARE * theirs)
