"""What is asked under load: requests of every kind, each with the answer that it gives alone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from events.grammar import JSON_SCHEMA, REGEX, Grammar
from events.request import CoreRequest
from tests.replica.front.rig import Answer, RouterEnd, request

PLAIN_IDS = range(3, 299)
"""Of the tiny model's vocabulary, without the special ones."""

SCHEMAS = (
    {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]},
    {"type": "array", "items": {"enum": ["the", "and"]}, "minItems": 1, "maxItems": 4},
    {"enum": ["user", "system", "assistant"]},
)
REGEXES = ("[a-f]{3,12}", "(in|the|and){2}[0-9]{1,6}")


@dataclass
class Script:
    """One request as it is asked over and over. `answers`: what each child says alone."""

    request: CoreRequest
    answers: list[Answer] = field(default_factory=list)

    def asked(self, request_id: str, **changes: object) -> CoreRequest:
        """The same under a name of its own."""
        return msgspec.structs.replace(self.request, request_id=request_id, **changes)


def chatty(seed: int, count: int) -> list[Script]:
    """Answers of many bytes from the first one on: few of them fill all that lies between a replica
    and a reader."""
    rng = random.Random(seed)
    fields = {"max_tokens": 20, "ignore_eos": True, "logprobs": 20, "prompt_logprobs": 20}
    return [
        Script(request("x", rng.choices(PLAIN_IDS, k=200), tenant="c", model="m", **fields))
        for _ in range(count)
    ]


def scripts(seed: int, count: int) -> list[Script]:
    """Tenants with shared heads; short and long; all that sampling can be asked for."""
    rng = random.Random(seed)
    heads = [rng.choices(PLAIN_IDS, k=rng.randint(20, 60)) for _ in range(5)]
    return [Script(_request(rng, number, heads)) for number in range(count)]


def _request(rng: random.Random, number: int, heads: Sequence[list[int]]) -> CoreRequest:
    head = rng.choice(heads)
    tail = rng.choices(PLAIN_IDS, k=rng.randint(1, 30))
    tenant = rng.choice(("a", "a", "b", "c"))
    wanted = rng.randint(1, 48)
    sampled = rng.random() < 0.5
    changes: dict[str, object] = {
        "max_tokens": wanted,
        "seed": number,
        "n": rng.choice((1, 1, 1, 2, 3)),
        "temperature": rng.choice((0.7, 1.2)) if sampled else 0.0,
    }
    kind = rng.randrange(7)
    if kind == 0:
        changes |= {"grammar": Grammar(JSON_SCHEMA, json.dumps(rng.choice(SCHEMAS)))}
    elif kind == 1:
        changes |= {"grammar": Grammar(REGEX, rng.choice(REGEXES))}
    elif kind == 2:
        changes |= {"presence_penalty": 0.8, "repetition_penalty": 1.2}
    elif kind == 3:
        changes |= {"stop": ("e", "an", "ing"), "min_tokens": wanted // 3}
    elif kind == 4:
        changes |= {"logprobs": 3, "top_k": 20, "top_p": 0.9}
    elif kind == 5:
        changes |= {"ignore_eos": True, "logit_bias": {5: 2.0, 80: -4.0}}
    prompt = (*head[: rng.randint(8, len(head))], *tail)
    return request("x", prompt, tenant=tenant, salt=tenant.encode(), model="m", **changes)


async def learn(wanted: Sequence[Script], router: RouterEnd) -> None:
    """Ask each by itself; what is said then is right."""
    for number, script in enumerate(wanted):
        name = f"alone-{number}"
        await router.send(script.asked(name))
        for child in range(script.request.sampling.n):
            answer = await router.answer(name, child=child)
            assert answer.finish is not None
            assert answer.finish.reason in ("stop", "length"), answer.finish
            script.answers.append(answer)
