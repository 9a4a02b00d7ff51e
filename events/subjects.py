"""Subject names. A replica may publish only under its own, a router only under its own."""

from __future__ import annotations

import re

PREFIX = "wr.v1"
_TOKEN = re.compile(r"^[A-Za-z0-9_-]{1,64}$")


def check_id(name: str) -> str:
    """The name itself. Raises ValueError when it can't be one token of a subject."""
    if not _TOKEN.match(name):
        raise ValueError("an id needs 1 to 64 characters out of letters, digits, '_' and '-'")
    return name


def replica_subject(cluster: str, replica: str, kind: str) -> str:
    """kind: hello, load, digest, bye. `replica` may be "*" for a subscriber."""
    return f"{PREFIX}.{cluster}.replica.{replica}.{kind}"


def snapshot_subject(cluster: str, replica: str) -> str:
    """Request/reply: one chunk of the replica's frozen digest."""
    return f"{PREFIX}.{cluster}.snapshot.{replica}"


def roll_call_subject(cluster: str) -> str:
    """A router that starts asks every replica for a hello here."""
    return f"{PREFIX}.{cluster}.rollcall"


def router_subject(cluster: str, router: str, kind: str) -> str:
    """kind: decisions, outcomes, alarm, peers, scale. `router` may be "*" for a subscriber."""
    return f"{PREFIX}.{cluster}.router.{router}.{kind}"


def split(subject: str) -> tuple[str, str, str]:
    """(role, id, kind) of a replica or router subject. Raises ValueError."""
    parts = subject.split(".")
    if len(parts) != 6:
        raise ValueError("not a replica or router subject")
    return parts[3], parts[4], parts[5]


def router_boot_name(router: str, boot: int) -> str:
    """One life of a router, as requests and load reports name it."""
    return f"{router}-{boot}"
