"""The load: tenants with long system prompts of their own, a public head, turns, Poisson arrivals.

Everything follows from the seed; texts are made of common words, so that the tokens per word of
any tokenizer are near one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from configs.model.card import ModelCard

WORDS = """
account agent answer balance batch budget cache case change check city claim client code
contract country credit customer data date day delivery detail device document email error
event field file form group history house image index invoice item key language letter level
limit line list load manager market message method model month name network note number
office order page part path payment people phone place plan point policy price problem
process product project question rate reason record region report request result review role
rule sale schedule school section service session size source space stage state step store
story street subject system table task team test text time title topic total trade travel
type user value version view visit week word work world year
""".split()


@dataclass(frozen=True, slots=True)
class Conversation:
    """One tenant's talk: the system prompt and what the user says, turn by turn."""

    tenant: str
    system: str
    questions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of the load: at `at_s`, conversation `conversation` says its turn `turn`."""

    at_s: float
    conversation: int
    turn: int


@dataclass(frozen=True, slots=True)
class Load:
    """`public` heads every system prompt; `arrivals` is in order of time."""

    public: str
    conversations: tuple[Conversation, ...]
    arrivals: tuple[Turn, ...]
    max_tokens: int


def _prose(rng: random.Random, card: ModelCard, tokens: int) -> str:
    """Sentences of about `tokens` tokens (never more)."""
    words: list[str] = []
    for _ in range(tokens):
        words.append(rng.choice(WORDS))
        if len(words) % 12 == 0:
            words[-1] += "."
    ids = card.tokenizer.encode(" ".join(words))[:tokens]
    return card.tokenizer.decode(ids).rsplit(" ", 1)[0]


def conversations(
    card: ModelCard, *, tenants: int, turns: int, system_tokens: int, seed: int
) -> tuple[str, tuple[Conversation, ...]]:
    """The public head and one conversation for each tenant."""
    rng = random.Random(seed)
    public = "You are a careful assistant of a large company. " + _prose(rng, card, 240)
    talks = tuple(
        Conversation(
            tenant=f"demo-{index}",
            system=f"{public} These are the rules of tenant {index}. "
            + _prose(rng, card, system_tokens),
            questions=tuple(_prose(rng, card, 24) + "?" for _ in range(turns)),
        )
        for index in range(tenants)
    )
    return public, talks


def arrivals(count: int, turns: int, *, requests_per_s: float, seed: int) -> tuple[Turn, ...]:
    """A Poisson process whose events are dealt to the conversations at random, turns in order."""
    rng = random.Random(seed + 1)
    deck = [index for index in range(count) for _ in range(turns)]
    rng.shuffle(deck)
    said = [0] * count
    result: list[Turn] = []
    now = 0.0
    for index in deck:
        result.append(Turn(now, index, said[index]))
        said[index] += 1
        now += rng.expovariate(requests_per_s)
    return tuple(result)
