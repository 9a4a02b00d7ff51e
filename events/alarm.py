"""What a router says of its alarms. Nothing here holds prompts, tokens, keys or salts."""

from __future__ import annotations

import msgspec


class AlarmNotice(msgspec.Struct, frozen=True, kw_only=True):
    """One named alarm about one replica, on or just over.

    `age_ms` counts from its first sighting, `count` its sightings. A notice about one that is on is
    repeated every few seconds, so a listener may forget what it no longer hears.
    """

    name: str
    replica: str
    active: bool
    age_ms: float
    count: int
    detail: str
    wall_time_ms: int
