"""What the policy is to reach, and whether these figures show it: one row for each goal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    found = {scenario.name: result for scenario, result in results}
    made = [goal for scenario, result in results for goal in _of(scenario, result, found)]
    sought = [_capacity(s, result, found) for s, result in results if _is_sought(s, result)]
    if sought:
        made.append(max(sought, key=lambda goal: goal.ours / goal.theirs))
    return made


def _of(scenario: Scenario, result: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Goal]:
    policies = result["policies"]
    peers = _peers(policies)
    if scenario.name.startswith("ladder"):
        yield _published(scenario, policies[OURS])
    if scenario.cpu_bound_s is not None and OURS in result.get("cpu_s", {}):
        yield _simulated(scenario, scenario.cpu_bound_s, result["cpu_s"][OURS])
    if _is_sought(scenario, result):
        goal = _capacity(scenario, result, found)
        yield replace(
            goal, words="capacity not below the best peer's", met=goal.ours >= goal.theirs
        )
    elif scenario.mooncake and peers:
        yield from _at_load(scenario, policies, peers)


def _peers(policies: Mapping[str, Any]) -> dict[str, Any]:
    return {name: f for name, f in policies.items() if name not in (OURS, CLAIRVOYANT)}


def _is_sought(scenario: Scenario, result: Mapping[str, Any]) -> bool:
    sought = scenario.mooncake and scenario.capacity_slo_s is not None
    return sought and bool(_peers(result["policies"]))


def _simulated(scenario: Scenario, bound_s: float, cpu_s: float) -> Goal:
    words = f"simulated within {bound_s:g} s of one core's CPU"
    return Goal(scenario.title, words, cpu_s, bound_s, "bound", cpu_s <= bound_s)


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


def _capacity(scenario: Scenario, result: Mapping[str, Any], found: Mapping[str, Any]) -> Goal:
    """What one of the traces is to show."""
    policies, peers = result["policies"], _peers(result["policies"])
    best = max(peers, key=lambda name: peers[name]["capacity_load"])
    theirs, load = peers[best]["capacity_load"], policies[OURS]["capacity_load"]
    words = f"capacity at least {CAPACITY_SHARE:g} of the best peer's on one trace, this the best"
    if scenario.bound in found:
        bound = found[scenario.bound]["policies"][OURS]["capacity_load"]
        words += f"; {bound:.3f} where nothing is ever evicted"
    return Goal(scenario.title, words, load, theirs, best, load >= CAPACITY_SHARE * theirs)
