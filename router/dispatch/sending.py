"""What the dispatchers of all revisions have in common."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from configs.model.card import ModelCard
from router.choice.choose import RouterBrain
from router.dispatch.dispatch import Dispatcher, RouteListener, Splits, Watcher
from router.dispatch.links import Links
from router.dispatch.sink import SinkLimits
from router.fleet.expected import MAIN
from router.openai.logprobs import TokenTexts
from router.openai.schema import Limits
from router.rendering.render import Renderer
from router.replication.compute import Unheard
from router.revisions.revisions import Revision
from router.revisions.watch import Watch


@dataclass(frozen=True, slots=True)
class Sending:
    """`backends` are the ids of servers of other kinds: only the main model has such."""

    brain: RouterBrain
    links: Links
    limits: SinkLimits
    listener: RouteListener
    backends: Collection[str]
    watchers: Sequence[Watcher]
    splits: Splits

    def dispatcher(
        self,
        listener: RouteListener,
        watchers: Sequence[Watcher] = (),
        splits: Splits | None = None,
    ) -> Dispatcher:
        """One that tells of its attempts."""
        return Dispatcher(
            self.brain,
            self.links,
            self.brain.router_boot,
            self.limits,
            listener,
            self.backends,
            watchers,
            self.brain.fleet.lacking,
            splits,
        )

    def revision(
        self, name: str, card: ModelCard, renderer: Renderer, texts: TokenTexts, widest: Limits
    ) -> Revision:
        """A revision whose attempts are watched."""
        # The main model has no bounds: nobody looks at what it has under way.
        waits = None if name == MAIN else self.brain.waits
        live = Watch(self.listener, time.monotonic, waits)
        mirrored = Watch(Unheard(), time.monotonic)
        return Revision(
            name=name,
            card=card,
            renderer=renderer,
            texts=texts,
            widest=widest,
            dispatcher=self.dispatcher(live, self.watchers, self.splits),
            live=live,
            mirrored=mirrored,
            mirror_dispatcher=self.dispatcher(mirrored),
        )
