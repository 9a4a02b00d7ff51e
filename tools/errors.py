"""What a command tells its user when it can't go on."""

from __future__ import annotations


class CommandError(Exception):
    """Printed as one line; the exit status is 1."""
