"""Revisions of the model, each with its own pools of replicas, served under one name by shares.

A conversation stays on its revision: the share decides by a hash of whose it is and how it began,
and a change of shares moves no more conversations than it must. A revision that leaves its bounds
loses its share by itself, and gets it back from nobody but an operator.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mmh3
import msgspec

from configs.model.card import ModelCard
from configs.schema import RevisionConfig
from events.errors import WireError
from events.subjects import check_id
from router.dispatch.dispatch import Dispatcher
from router.fleet.expected import MAIN
from router.fleet.fleet import Fleet
from router.openai.logprobs import TokenTexts
from router.openai.schema import ChatRequest, CompletionRequest, Limits
from router.rendering.render import Renderer
from router.revisions.watch import Watch
from router.telemetry.alarms import Alarms, Clock

REVERTED = "revision_reverted"
CHECK_S = 0.5
BEGINNING_CHARS = 256


class Share(msgspec.Struct, frozen=True):
    """Of all requests it answers `weight`; of the others `mirror` are copied to it."""

    weight: float
    mirror: float


NO_SHARE = Share(0.0, 0.0)


@dataclass(slots=True)
class Revision:
    """One model and all that its requests need. `live` and `mirrored` watch its attempts."""

    name: str
    card: ModelCard
    renderer: Renderer
    texts: TokenTexts
    widest: Limits
    dispatcher: Dispatcher
    live: Watch
    mirrored: Watch
    mirror_dispatcher: Dispatcher
    bounds: RevisionConfig | None = None
    share: Share = NO_SHARE
    reverted: str = ""
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        self.fingerprint = f"fp_{self.card.weights_fingerprint[:10]}"


def check_revisions(configs: Sequence[RevisionConfig]) -> None:
    """Raises ValueError on names and shares that can't be."""
    names = [MAIN, *(check_id(config.name) for config in configs)]
    if len(set(names)) < len(names):
        raise ValueError(f'revisions have names of their own, and none is "{MAIN}"')
    if sum(config.weight for config in configs) > 1:
        raise ValueError("the weights of all revisions come to more than 1")


class Revisions:
    """The main model and the others. `on_reverted` is told of names."""

    def __init__(
        self,
        main: Revision,
        others: Iterable[Revision],
        fleet: Fleet,
        clock: Clock = time.monotonic,
    ) -> None:
        self.main = main
        self.others = {revision.name: revision for revision in others}
        self.on_reverted: Callable[[str], None] = lambda _: None
        self._fleet = fleet
        self._alarms: Alarms = fleet.alarms
        self._clock = clock
        self._checked_s = clock()

    def all(self) -> list[Revision]:
        """The main one first."""
        return [self.main, *self.others.values()]

    def weights(self) -> dict[str, float]:
        """Shares of the requests; they come to 1."""
        weights = {name: of.share.weight for name, of in self.others.items()}
        return {MAIN: max(0.0, 1.0 - sum(weights.values())), **weights}

    def of(self, tenant: str, asked: ChatRequest | CompletionRequest) -> Revision:
        """Who answers this request. Token ids are those of the main model."""
        beginning = beginning_of(asked) if self.others else None
        return self.main if beginning is None else self.assign(tenant, beginning)

    def may_mirror(self, asked: ChatRequest | CompletionRequest) -> bool:
        """Whether it means the same to all revisions."""
        return beginning_of(asked) is not None

    def assign(self, tenant: str, beginning: bytes) -> Revision:
        """Whose turn it is: the same for the same beginning of the same tenant, while its share
        lasts and a replica of it can be asked."""
        if not self.others:
            return self.main
        self._check()
        there, weights = self._there(), self.weights()
        able = [of for of in self.all() if of.name in there and weights[of.name] > 0]
        seed = tenant.encode() + b"\0" + beginning
        return max(able, key=lambda of: _draw(seed, of.name, weights[of.name]), default=self.main)

    def set_share(self, name: str, share: Share) -> None:
        """An operator's word: it also ends a revert. Raises KeyError."""
        revision = self.others[name]
        if share == revision.share and not revision.reverted:
            return
        revision.share, revision.reverted = share, ""
        revision.live.forget()
        self._alarms.clear(REVERTED, name)

    def report(self) -> list[dict[str, Any]]:
        """For people to look at."""
        self._check()
        weights = self.weights()
        pools = list(self._fleet.pools().values())
        return [
            {
                "revision": of.name,
                "weights": of.card.weights_fingerprint[:16],
                "weight": weights[of.name],
                "mirror": of.share.mirror,
                "reverted": of.reverted,
                "replicas": sum(len(p.replicas) for p in pools if p.revision == of.name),
                "live": of.live.report(),
                "mirrored": of.mirrored.report(),
            }
            for of in self.all()
        ]

    def _there(self) -> set[str]:
        """Revisions of which a replica can be asked."""
        now_s, members = self._clock(), self._fleet.members
        return {
            pool.revision
            for pool in self._fleet.pools().values()
            if any(of.unavailable(now_s) is None for of in members(pool.name))
        }

    def _check(self) -> None:
        now_s = self._clock()
        if now_s - self._checked_s < CHECK_S:
            return
        self._checked_s = now_s
        for revision in self.others.values():
            bounds = revision.bounds
            if bounds is not None and revision.share.weight > 0:
                self._judge(revision, bounds)

    def _judge(self, revision: Revision, bounds: RevisionConfig) -> None:
        breach = revision.live.breach(bounds.slo_ttft_ms, bounds.slo_error_ratio)
        if not breach:
            return
        revision.share = Share(0.0, revision.share.mirror)
        revision.reverted = breach
        self._alarms.raise_(REVERTED, revision.name, f"it gets no requests any more: {breach}")
        self.on_reverted(revision.name)


def beginning_of(asked: ChatRequest | CompletionRequest) -> bytes | None:
    """What stays the same over the turns of a conversation. None for token ids: they are the main
    model's."""
    if isinstance(asked, ChatRequest):
        first = next((n for n, of in enumerate(asked.messages) if of.get("role") == "user"), 0)
        return msgspec.json.encode(asked.messages[: first + 1])
    prompt = asked.prompts[0]
    return prompt[:BEGINNING_CHARS].encode() if isinstance(prompt, str) else None


def _draw(seed: bytes, name: str, weight: float) -> float:
    """Weighted rendezvous: each wins its share of all seeds."""
    number = (mmh3.hash64(seed + b"\0" + name.encode(), signed=False)[0] + 1) / (2**64 + 1)
    return -weight / math.log(number)


class ShareSection:
    """Shares as all routers have them; see registry.Section."""

    def __init__(self, revisions: Revisions, configs: Iterable[RevisionConfig]) -> None:
        self._revisions = revisions
        self._file = {of.name: encode_share(Share(of.weight, of.mirror)) for of in configs}

    def apply(self, name: str, value: bytes | None) -> None:
        """See Section.apply."""
        try:
            share = msgspec.msgpack.decode(value or b"", type=Share)
            if not (0 <= share.weight <= 1 and 0 <= share.mirror <= 1):
                raise ValueError
            if share != self._revisions.others[name].share:
                # The same share again is no operator's word: a revert is told by all that saw it.
                self._revisions.set_share(name, share)
        except (ValueError, KeyError, msgspec.MsgspecError):
            raise WireError("a revision's share that can't be used here") from None

    def in_file(self, name: str) -> bytes | None:
        """See Section.in_file."""
        return self._file.get(name)


def encode_share(share: Share) -> bytes:
    """A share as it is kept."""
    return msgspec.msgpack.encode(share)
