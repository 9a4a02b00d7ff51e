"""What the book simulates: real traces at two loads, a published ladder, and what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tools.sim.faults import Fault
from tools.sim.profiles import DEVICES
from tools.sim.settings import CLAIRVOYANT
from tools.sim.simulate import EVERY, OURS
from tools.sim.tiers import TierSpec

CONVERSATION = "mooncake_conversation_2000.jsonl"
SYNTHETIC = "mooncake_synthetic_full_min.jsonl"
AGENTS = "agents:kinds=16,rates=3,stage_s=60,turns=5,think_s=6"
LADDER = "groups:rates=4/8/12,stage_s=15,arrival=constant"
LONG_LADDER = "groups:rates=3/6/9/12/15,stage_s=45,arrival=constant"
"""Nine requests a second in the mean, and so long that most find their group's prompt computed."""

KV_TOKENS = 1_048_576
SMALL_KV_TOKENS = 131_072
UNBOUNDED_KV_TOKENS = 67_108_864
RIVALS = (
    *(OURS, "block_cost", "bounded_hash", "least_load"),
    *("longest_prefix", "preble", "weighted"),
)
"""On the long traces: without random, round robin and two choices, which know no cache either."""
LADDER_RIVALS = (OURS, "block_cost", "least_load", "longest_prefix", "weighted")
PUBLISHED_P90_S = 0.542
PUBLISHED_LADDER = (
    "150 groups of 5 prompts, system 6,000, question 1,200, output 1,000 tokens. llm-d publishes "
    "(8 x Qwen 32B on 2 x H100 each; 8,730 output tokens/s, 8.7 such answers a second) a TTFT p90 "
    f"of {PUBLISHED_P90_S} s with its precise scheduling, 31.1 s with the approximate one. A cold "
    "prompt alone takes this device 0.51 s, and of 360 requests about 130 are a group's first."
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """`trace` is a file of the data folder or a generated one; `changes` are of the simulation's
    settings; `note` says what the table alone would not. With `capacity_slo_s` all that is sought
    is the highest load at which the p90 TTFT stays below it. `mooncake`: the goals are about it.
    Figures are means over the seeds, as ties are broken at random. `bound`: the scenario that says
    how much of the goal any router could reach. `cpu_bound_s`: so long it may take to simulate."""

    name: str
    title: str
    trace: str
    changes: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    slo_ttft_s: float = 2.0
    capacity_slo_s: float | None = None
    mooncake: bool = False
    policies: tuple[str, ...] = EVERY
    seeds: tuple[int, ...] = (1,)
    bound: str = ""
    cpu_bound_s: float | None = None


def _mooncake(name: str, trace: str, load: float, seeds: tuple[int, ...] = (1,)) -> Scenario:
    return Scenario(
        f"{name}-{load:g}",
        f"Mooncake's {name} trace at {load:g} of the no-cache capacity",
        trace,
        {"load": load, "kv_tokens": KV_TOKENS},
        mooncake=True,
        policies=(*RIVALS, CLAIRVOYANT),
        seeds=seeds,
    )


def _mooncake_capacity(name: str, trace: str, guess: float) -> Scenario:
    return Scenario(
        f"{name}-capacity",
        f"Mooncake's {name} trace: the highest load at which p90 TTFT stays below 2 s",
        trace,
        {"load": guess, "kv_tokens": KV_TOKENS},
        capacity_slo_s=2.0,
        mooncake=True,
        policies=RIVALS,
        bound=f"{name}-unbounded",
    )


def _unbounded(name: str, trace: str, guess: float) -> Scenario:
    """What no router can get beyond, as far as caches go."""
    return Scenario(
        f"{name}-unbounded",
        f"Mooncake's {name} trace, as before, where nothing is ever evicted",
        trace,
        {"load": guess, "kv_tokens": UNBOUNDED_KV_TOKENS},
        "Each replica's KV holds the whole trace: a bound of what keeping the right prefixes could "
        "give.",
        capacity_slo_s=2.0,
        policies=(OURS,),
    )


def _ladder(
    name: str, title: str, trace: str, kv_tokens: int, policies: tuple[str, ...] = EVERY
) -> Scenario:
    return Scenario(
        name,
        title,
        trace,
        {"load": None, "kv_tokens": kv_tokens, "device": DEVICES["h100-32b-tp2"]},
        PUBLISHED_LADDER,
        policies=policies,
    )


def _agents(name: str, title: str, **changes: Any) -> Scenario:
    return Scenario(name, title, AGENTS, {"load": 0.9, "kv_tokens": SMALL_KV_TOKENS} | changes)


ALL = (
    _mooncake("conversation", CONVERSATION, 0.75),
    _mooncake("conversation", CONVERSATION, 1.2, (1, 2, 3)),
    _mooncake("synthetic", SYNTHETIC, 0.75),
    _mooncake("synthetic", SYNTHETIC, 1.2, (1, 2, 3)),
    _ladder("ladder-published", "The ladder: the prompts take 73 % of the caches", LADDER, 307_328),
    _ladder(
        "ladder-published-long",
        "A ladder five times as long: few of its prompts are cold",
        LONG_LADDER,
        307_328,
        LADDER_RIVALS,
    ),
    _ladder("ladder-tight", "The ladder: the caches take 73 % of the prompts", LADDER, 164_250),
    Scenario(
        "siblings",
        "Bursts of 32 siblings on a cold prefix of 16,000 tokens",
        "siblings:bursts=16,every_s=6",
        {"load": None, "kv_tokens": KV_TOKENS},
    ),
    _agents("agents", "Agents of five turns, nothing wrong"),
    _agents("slow", "The same agents, one replica at half its speed", speeds=(("r0", 0.5),)),
    _agents("silent", "The same agents, one replica publishes no digests", muted=("r0",)),
    _agents(
        "router-restart",
        "The same agents, the router restarts after 10 s",
        faults=(Fault(10.0, "router"),),
    ),
    _agents(
        "tiers",
        "The same agents, little KV on the devices, host memory and a shared store below",
        kv_tokens=SMALL_KV_TOKENS // 4,
        tiers=(
            TierSpec(SMALL_KV_TOKENS, gbytes_per_s=25.0, latency_ms=0.2, shared=False),
            TierSpec(8 * SMALL_KV_TOKENS, gbytes_per_s=3.0, latency_ms=2.0, shared=True),
        ),
    ),
    Scenario(
        "capacity",
        "Agents: the highest load at which p90 TTFT stays below 1 s",
        AGENTS.replace("stage_s=60", "stage_s=15"),
        {"load": None, "kv_tokens": SMALL_KV_TOKENS},
        capacity_slo_s=1.0,
    ),
    _mooncake_capacity("conversation", CONVERSATION, 1.0),
    _mooncake_capacity("synthetic", SYNTHETIC, 1.6),
    _unbounded("conversation", CONVERSATION, 1.4),
    _unbounded("synthetic", SYNTHETIC, 1.8),
    Scenario(
        "large",
        "Twelve thousand requests of agents over eight replicas: how long that takes to simulate",
        "agents:kinds=16,rates=20,stage_s=120,turns=5,think_s=6",
        {"load": 0.75, "kv_tokens": KV_TOKENS},
        policies=(OURS,),
        cpu_bound_s=120.0,
    ),
    Scenario(
        "wide",
        "Two thousand requests of agents over 512 replicas: how long that takes to simulate",
        "agents:kinds=64,rates=40,stage_s=10,turns=5,think_s=6",
        {"load": None, "kv_tokens": KV_TOKENS, "replicas": 512},
        policies=(OURS,),
    ),
)
