"""Traces made up on the spot: `kind:key=value,...`, each key with a default.

- `groups`: shared-prefix groups, as serving benchmarks generate them: every group has its own
  system prompt and a few fixed questions behind it, asked again and again.
- `agents`: sessions of several turns; each turn's prompt is the last one, its answer and a step.
- `siblings`: bursts of requests that share a prefix which nobody has seen before.
- `mixed`: long prompts with short answers beside short prompts with long ones; nothing is shared.

Lengths are in tokens, `rates` in requests (or sessions) a second, one for each stage of a ladder.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, Literal, Protocol, get_type_hints

import numpy as np

from tools.sim.call import Call, Trace, TraceError

MAX_CALLS = 1_000_000
MAX_BLOCKS = 100_000_000
MAX_PROMPT_TOKENS = 4_000_000

Arrival = Literal["poisson", "constant"]
Rates = tuple[float, ...]


class _Kind(Protocol):
    """The settings of one kind, and how it makes its calls out of them."""

    @property
    def block(self) -> int: ...

    @property
    def seed(self) -> int: ...

    def size(self) -> tuple[float, float]:
        """Calls at most, and tokens of the longest prompt."""

    def calls(self, rng: random.Random) -> Iterator[Call]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """`groups` tenants with `prompts` questions each. A tenant's share of the traffic falls with
    its rank to the power of `zipf`; 0 is uniform. Each rate holds for `stage_s`."""

    groups: int = 150
    prompts: int = 5
    system: int = 6_000
    question: int = 1_200
    output: int = 1_000
    rates: Rates = (10.0,)
    stage_s: float = 60.0
    arrival: Arrival = "poisson"
    zipf: float = 0.0
    block: int = 100
    seed: int = 1

    def size(self) -> tuple[float, float]:
        """Of the whole ladder."""
        return sum(self.rates) * self.stage_s, self.system + self.question

    def calls(self, rng: random.Random) -> Iterator[Call]:
        """Each arrival asks one of a random group's questions."""
        weights = list(accumulate((rank + 1) ** -self.zipf for rank in range(self.groups)))
        prompts: dict[tuple[int, int], np.ndarray] = {}
        ids = _Ids(self.block)
        heads = [ids.fresh(self.system) for _ in range(self.groups)]
        for at_s in _arrivals(self.rates, self.stage_s, self.arrival, rng):
            (group,) = rng.choices(range(self.groups), cum_weights=weights)
            which = group, rng.randrange(self.prompts)
            if which not in prompts:
                prompts[which] = ids.behind(heads[group], self.system, self.question)
            tokens = self.system + self.question
            yield Call(at_s, f"g{group}", prompts[which], tokens, self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """Sessions of `turns` that share the system prompt of one of `kinds` agents. The next turn
    comes `think_s` (in the mean) after the last one."""

    kinds: int = 8
    system: int = 4_000
    turns: int = 8
    step: int = 800
    output: int = 200
    think_s: float = 8.0
    rates: Rates = (1.0,)
    stage_s: float = 120.0
    arrival: Arrival = "poisson"
    block: int = 100
    seed: int = 1

    def size(self) -> tuple[float, float]:
        """Of all turns of all sessions."""
        sessions = sum(self.rates) * self.stage_s
        return sessions * self.turns, self.system + self.turns * (self.step + self.output)

    def calls(self, rng: random.Random) -> Iterator[Call]:
        """A session's blocks are numbered once; each turn sees more of them."""
        ids = _Ids(self.block)
        heads = [ids.fresh(self.system) for _ in range(self.kinds)]
        grown = self.turns * (self.step + self.output)
        for at_s in _arrivals(self.rates, self.stage_s, self.arrival, rng):
            kind = rng.randrange(self.kinds)
            blocks = ids.behind(heads[kind], self.system, grown)
            for turn in range(self.turns):
                tokens = self.system + (turn + 1) * self.step + turn * self.output
                seen = blocks[: math.ceil(tokens / self.block)]
                yield Call(at_s, f"agent-{kind}", seen, tokens, self.output)
                at_s += rng.expovariate(1 / self.think_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Siblings:
    """`bursts`, one every `every_s`: so many siblings within `within_s`, on a cold prefix."""

    bursts: int = 40
    siblings: int = 32
    system: int = 16_000
    question: int = 200
    output: int = 100
    every_s: float = 10.0
    within_s: float = 0.5
    block: int = 100
    seed: int = 1

    def size(self) -> tuple[float, float]:
        """Of all bursts."""
        return self.bursts * self.siblings, self.system + self.question

    def calls(self, rng: random.Random) -> Iterator[Call]:
        """A burst's siblings differ in the question."""
        ids = _Ids(self.block)
        for burst in range(self.bursts):
            head = ids.fresh(self.system)
            for _ in range(self.siblings):
                at_s = burst * self.every_s + rng.random() * self.within_s
                blocks = ids.behind(head, self.system, self.question)
                yield Call(at_s, "siblings", blocks, self.system + self.question, self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """A share `readers` asks about `long` tokens and gets `brief` ones; the others say `short` and
    get `output`."""

    readers: float = 0.3
    long: int = 8_000
    brief: int = 50
    short: int = 200
    output: int = 400
    rates: Rates = (10.0,)
    stage_s: float = 60.0
    arrival: Arrival = "poisson"
    block: int = 100
    seed: int = 1

    def size(self) -> tuple[float, float]:
        """Of the whole ladder."""
        return sum(self.rates) * self.stage_s, max(self.long, self.short)

    def calls(self, rng: random.Random) -> Iterator[Call]:
        """Every prompt is its own."""
        ids = _Ids(self.block)
        for at_s in _arrivals(self.rates, self.stage_s, self.arrival, rng):
            reads = rng.random() < self.readers
            tokens, output = (self.long, self.brief) if reads else (self.short, self.output)
            tenant = "readers" if reads else "writers"
            yield Call(at_s, tenant, ids.fresh(tokens), tokens, output)


KINDS: dict[str, type[Groups | Agents | Siblings | Mixed]] = {
    "groups": Groups,
    "agents": Agents,
    "siblings": Siblings,
    "mixed": Mixed,
}


def generate(text: str) -> Trace:
    """The trace that `kind:key=value,...` says. Raises TraceError, naming what is wrong."""
    name, _, rest = text.partition(":")
    if name not in KINDS:
        raise TraceError(f"unknown kind of trace '{name}'; known: {', '.join(KINDS)}")
    kind: _Kind = KINDS[name](**_settings(KINDS[name], rest))
    calls, tokens = kind.size()
    if calls > MAX_CALLS or tokens > MAX_PROMPT_TOKENS or calls * tokens > MAX_BLOCKS * kind.block:
        raise TraceError(f"'{text}': {calls:.0f} requests of up to {tokens:.0f} tokens, too many")
    made = sorted(kind.calls(random.Random(kind.seed)), key=lambda call: call.arrival_s)
    if not made:
        raise TraceError(f"'{text}' makes no request")
    return Trace(text, kind.block, tuple(made))


def _settings(kind: type[Any], text: str) -> dict[str, Any]:
    hints = get_type_hints(kind)
    known = {field.name: hints[field.name] for field in fields(kind)}
    settings: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in known:
            raise TraceError(f"unknown setting '{key}'; known: {', '.join(known)}")
        settings[key] = _value(key, known[key], value)
    return settings


def _value(key: str, wanted: Any, text: str) -> Any:
    """Whole numbers from 1 on (a seed or an output from 0), others above 0 (zipf from 0)."""
    if wanted == Arrival:
        if text not in ("poisson", "constant"):
            raise TraceError(f"'{key}={text}': takes poisson or constant")
        return text
    try:
        if wanted == Rates:
            return tuple(_number(part, float, above=True) for part in text.split("/"))
        return _number(text, wanted, above=key not in ("seed", "zipf", "output"))
    except ValueError:
        form = {int: "a whole number", float: "a number"}.get(wanted, "numbers, as in 3/10/20,")
        raise TraceError(f"'{key}={text}': takes {form} in range") from None


def _number(text: str, wanted: type[int] | type[float], *, above: bool) -> float:
    number = wanted(text)
    if not 0 <= number < math.inf or (above and number == 0):
        raise ValueError(text)
    return number


def _arrivals(
    rates: Rates, stage_s: float, arrival: Arrival, rng: random.Random
) -> Iterator[float]:
    """Times in s: evenly spaced, or as a Poisson process, each rate for one stage."""
    for stage, rate in enumerate(rates):
        at_s, end_s = stage * stage_s, (stage + 1) * stage_s
        while True:
            at_s += rng.expovariate(rate) if arrival == "poisson" else 1 / rate
            if at_s > end_s + 1e-9:
                break
            yield at_s


class _Ids:
    """Hands out block ids, each once."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._next = 1

    def fresh(self, tokens: int) -> np.ndarray:
        """int64 (started blocks,) of a text that nobody has seen."""
        first = self._next
        self._next += math.ceil(tokens / self._block_tokens)
        return np.arange(first, self._next)

    def behind(self, head: np.ndarray, head_tokens: int, tokens: int) -> np.ndarray:
        """int64: the head's whole blocks, and new ones for what follows in the text."""
        whole = head_tokens // self._block_tokens
        return np.concatenate(
            (head[:whole], self.fresh(head_tokens + tokens - whole * self._block_tokens))
        )
